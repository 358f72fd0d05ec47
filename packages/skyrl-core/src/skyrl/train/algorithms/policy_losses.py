"""What each sampled token adds to the policy loss, before it is weighted and summed.

A loss sees flat response tokens of whole sequences and returns one value per token; reductions are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from skyrl.train.algorithms.tables import Table

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossInputs:
    """All [T]. `logprobs_T` carries the gradient; the others are constants. Segments are sequences, 0..S-1 within the
    micro-batch; groups are prompts; positions count from 0 within a response."""

    logprobs_T: torch.Tensor
    old_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    loss_mask_T: torch.Tensor
    segment_ids_T: torch.Tensor
    group_ids_T: torch.Tensor
    positions_T: torch.Tensor
    rollout_logprobs_T: torch.Tensor


@dataclass(frozen=True)
class TokenLoss:
    """`loss_T`, and per-token values to report: their mean over trained tokens becomes policy/loss_metrics/NAME."""

    loss_T: torch.Tensor
    metrics_T: dict[str, torch.Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[LossInputs, Any], TokenLoss]


def regular(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476):

        -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A),   r = exp(logp - old_logp)

    clip_ratio: the share of tokens whose clipped branch is the one taken.
    """
    ratio_T = policy_ratio(inputs)
    plain_T = -ratio_T * inputs.advantages_T
    bounded_T = ratio_T.clamp(1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high)
    clipped_T = -bounded_T * inputs.advantages_T
    return TokenLoss(torch.maximum(plain_T, clipped_T), {"clip_ratio": (clipped_T > plain_T).detach()})


def dual_clip(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """`regular`, and for A < 0 at most -A c with c = `clip_ratio_c` (arXiv 1912.09729, eq. 5)."""
    loss = regular(inputs, algorithm)
    ceiling_T = -inputs.advantages_T * algorithm.clip_ratio_c
    bounded_T = torch.minimum(loss.loss_T, ceiling_T)
    return TokenLoss(torch.where(inputs.advantages_T < 0, bounded_T, loss.loss_T), loss.metrics_T)


def policy_ratio(inputs: LossInputs) -> torch.Tensor:
    """[T]: exp(logp - old_logp), the exponent clamped to [-20, 20]; 1 on tokens that are not trained on."""
    trained_T = inputs.loss_mask_T > 0
    delta_T = torch.where(trained_T, inputs.logprobs_T - inputs.old_logprobs_T, torch.zeros_like(inputs.logprobs_T))
    return delta_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


POLICY_LOSSES: Table[PolicyLoss] = Table(
    "trainer.algorithm.policy_loss_type", {"regular": regular, "dual_clip": dual_clip}
)


def register_policy_loss(name: str, loss: PolicyLoss) -> PolicyLoss:
    """Makes `trainer.algorithm.policy_loss_type=name` mean this function, in every worker started afterwards."""
    return POLICY_LOSSES.register(name, loss)
