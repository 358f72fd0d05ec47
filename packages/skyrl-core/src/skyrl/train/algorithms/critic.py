"""Whether a run has a critic, and what the critic is taught: the returns that were seen behind each token."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl.train.policy.batch import TrajectoryBatch

READS_VALUES = ("gae",)
"""Estimators of ours that look at `values_T`; a user's own may too."""


def uses_critic(trainer: Any) -> bool:
    """Whether a critic is started: `trainer.critic.model.path` is set and the estimator may look at its values."""
    without = ADVANTAGE_ESTIMATORS.builtin - set(READS_VALUES)
    return trainer.critic.model.path is not None and trainer.algorithm.advantage_estimator not in without


def critic_loss(
    micro: TrajectoryBatch, values_T: torch.Tensor, algorithm: Any, *, num_tokens: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss with gradient, this micro-batch's share of each metric), R the returns and V_old the values before the
    update (value function clipping, as arXiv 2005.12729 describes it):

        1/2 max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2)

    per trained token, in the mean over the mini-batch's sequences of each one's mean. `micro` carries `returns_T`,
    `values_T` and, as `loss_weights_T`, each token's share of that mean; `num_tokens` counts the trained tokens of the
    whole mini-batch. critic/values_mean and critic/values_clipfrac, the share of tokens whose clipped error is the
    larger one, are means over those tokens.
    """
    dtype, trained_T = values_T.dtype, micro.loss_mask_T > 0
    returns_T = micro.require("returns_T").to(dtype)
    old_T = micro.require("values_T").to(dtype)
    plain_T = (values_T - returns_T).square()
    error_T, clipped_T = plain_T, torch.zeros_like(trained_T)
    if algorithm.value_clip is not None:
        # and not old + clamp(new - old), which rounds a value that stays inside to another, and counts it as clipped
        near_T = values_T.clamp(old_T - algorithm.value_clip, old_T + algorithm.value_clip)
        bounded_T = (near_T - returns_T).square()
        error_T, clipped_T = torch.maximum(plain_T, bounded_T), bounded_T > plain_T
    loss = 0.5 * (error_T * micro.require("loss_weights_T").to(dtype)).sum()
    share = 1.0 / max(num_tokens, 1.0)
    shares = {
        "critic/critic_loss": loss,
        "critic/values_mean": (values_T * trained_T).sum() * share,
        "critic/values_clipfrac": (clipped_T & trained_T).sum().to(dtype) * share,
    }
    return loss, {name: value.detach() for name, value in shares.items()}
