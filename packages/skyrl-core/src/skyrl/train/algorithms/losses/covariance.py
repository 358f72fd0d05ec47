"""Losses that treat tokens apart whose logprob and advantage vary together: they are what makes entropy collapse.

Both are of "The Entropy Mechanism of Reinforcement Learning" (arXiv 2505.22617). The tokens are chosen over
the whole mini-batch, from a forward pass of the present weights before it is cut: public SkyRL chooses anew within each
micro-batch, and from advantages that its reduction has divided already, so that its bounds are never met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash

from skyrl.train.algorithms.losses.inputs import (
    LOG_RATIO_LIMIT,
    LossInputs,
    TokenLoss,
    clipped_surrogate,
    log_ratio_to,
    policy_ratio,
)
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.seeds import derive

Selection = Callable[[TrajectoryBatch, torch.Tensor, Any], torch.Tensor]


def clip_cov(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """Clip-Cov: `regular` without the tokens that `draw_within_bounds` chose.

    clip_ratio: the share of tokens that were chosen.
    """
    selected_T = _selected(inputs)
    loss_T = clipped_surrogate(policy_ratio(inputs), inputs.advantages_T, algorithm).loss_T
    return TokenLoss(torch.where(selected_T, torch.zeros_like(loss_T), loss_T), {"clip_ratio": selected_T})


def kl_cov(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """KL-Cov: -r A, plus `ppo_kl_coef` |logp - old_logp| on the tokens that `take_highest` chose.

    Nothing is clipped: clip_ratio is 0.
    """
    loss_T = -policy_ratio(inputs) * inputs.advantages_T
    penalty_T = algorithm.kl_cov.ppo_kl_coef * log_ratio_to(inputs, inputs.old_logprobs_T).abs()
    return TokenLoss(
        torch.where(_selected(inputs), loss_T + penalty_T, loss_T), {"clip_ratio": torch.zeros_like(loss_T).detach()}
    )


def draw_within_bounds(minibatch: TrajectoryBatch, logprobs_T: torch.Tensor, algorithm: Any) -> torch.Tensor:
    """bool [T]: max(1, `clip_ratio` x trained tokens) tokens, drawn among those with `clip_cov_lb` < covariance <
    `clip_cov_ub` that PPO's own clip does not hold back. The draw follows from the mini-batch's tokens alone."""
    settings, trained_T = algorithm.clip_cov, minibatch.loss_mask_T > 0
    advantages_T = minibatch.require("advantages_T").double()
    delta_T = logprobs_T.double() - minibatch.require("old_logprobs_T").double()
    ratio_T = torch.where(trained_T, delta_T, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    held_T = clipped_surrogate(ratio_T, advantages_T, algorithm).metrics_T["clip_ratio"]
    covariance_T = covariances(advantages_T, logprobs_T.double(), trained_T)
    inside_T = (covariance_T > settings.clip_cov_lb) & (covariance_T < settings.clip_cov_ub) & trained_T & ~held_T
    candidates = inside_T.nonzero().squeeze(1)
    count = max(1, int(settings.clip_ratio * int(trained_T.sum())))
    seed = derive(xxhash.xxh3_64(minibatch.token_ids_N.cpu().numpy().tobytes()).intdigest(), "clip_cov")
    order = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed))
    return _at(candidates[order[:count]], trained_T)


def take_highest(minibatch: TrajectoryBatch, logprobs_T: torch.Tensor, algorithm: Any) -> torch.Tensor:
    """bool [T]: the max(1, `kl_cov_frac` x trained tokens) trained tokens of highest covariance."""
    trained_T = minibatch.loss_mask_T > 0
    advantages_T = minibatch.require("advantages_T").double()
    covariance_T = covariances(advantages_T, logprobs_T.double(), trained_T)[trained_T]
    count = max(1, int(algorithm.kl_cov.kl_cov_frac * covariance_T.numel()))
    highest = torch.argsort(covariance_T, descending=True, stable=True)[:count]
    return _at(trained_T.nonzero().squeeze(1)[highest], trained_T)


SELECTIONS: dict[str, Selection] = {"clip_cov": draw_within_bounds, "kl_cov": take_highest}
"""Policy loss -> which tokens of a mini-batch it treats apart, from (mini-batch, present logprobs, algorithm)."""


def covariances(advantages_T: torch.Tensor, logprobs_T: torch.Tensor, trained_T: torch.Tensor) -> torch.Tensor:
    """[T]: (A - mean A) (logp - mean logp), the means over trained tokens; only those have a meaning."""
    advantages, logprobs = advantages_T[trained_T], logprobs_T[trained_T]
    if not advantages.numel():
        return torch.zeros_like(advantages_T)
    return (advantages_T - advantages.mean()) * (logprobs_T - logprobs.mean())


def _selected(inputs: LossInputs) -> torch.Tensor:
    assert inputs.selected_T is not None, "the mini-batch was not prepared for this loss"
    return inputs.selected_T


def _at(index: torch.Tensor, like_T: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(like_T)
    out[index] = True
    return out
