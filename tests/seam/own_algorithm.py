"""A user's entrypoint with an estimator and a loss of its own, one of the public form and one on flat tokens."""

from __future__ import annotations

import os
from typing import Any

import torch
import varied_reward  # noqa: F401 (registers its environment)
from skyrl.train.algorithms.advantages import register_advantage_estimator
from skyrl.train.algorithms.policy_losses import LossInputs, TokenLoss, register_policy_loss
from skyrl.train.entrypoints.main_base import main


@register_advantage_estimator("batch_baseline")
def batch_baseline(token_level_rewards: Any, response_mask: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores = token_level_rewards.sum(-1, keepdim=True)
    advantages = (scores - scores.mean()) * response_mask
    return advantages, advantages


@register_policy_loss("reinforce")
def reinforce(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    rank = torch.full_like(inputs.logprobs_T, float(os.environ.get("RANK", "0")))
    return TokenLoss(-inputs.logprobs_T * inputs.advantages_T, {"rank_max": rank.detach()})


@register_policy_loss("reinforce_sum")
def reinforce_sum(log_probs: Any, old_log_probs: Any, advantages: Any, config: Any, loss_mask: Any) -> Any:
    return -(log_probs * advantages * loss_mask).sum(), {"rank_max": float(os.environ.get("RANK", "0"))}


if __name__ == "__main__":
    main()
