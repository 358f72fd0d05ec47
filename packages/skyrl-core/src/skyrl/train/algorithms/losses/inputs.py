"""What a policy loss sees and returns, and the ratios that most losses are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossInputs:
    """All [T]. `logprobs_T` carries the gradient; the others are constants. Segments are sequences, 0..S-1 within the
    micro-batch; groups are prompts; positions count from 0 within a response. `selected_T` (bool) are the tokens that
    the loss treats apart, chosen over the whole mini-batch; None for losses that choose none. A loss that is anchored
    on the rollout may find the rollout's logprobs in `old_logprobs_T`. `loss_weights_T` is what each token's loss will
    be multiplied by."""

    logprobs_T: torch.Tensor
    old_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    loss_mask_T: torch.Tensor
    segment_ids_T: torch.Tensor
    group_ids_T: torch.Tensor
    positions_T: torch.Tensor
    rollout_logprobs_T: torch.Tensor
    selected_T: torch.Tensor | None = None
    loss_weights_T: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """`loss_T`, and per-token values to report as policy/loss_metrics/NAME: their mean over the trained tokens of the
    mini-batch, or their largest or smallest where NAME ends in `_max` or `_min`. `weighed` says that the loss has been
    multiplied by the weights already; it may then have any shape."""

    loss_T: torch.Tensor
    metrics_T: dict[str, torch.Tensor] = field(default_factory=dict)
    weighed: bool = False


PolicyLoss = Callable[[LossInputs, Any], TokenLoss]


def policy_ratio(inputs: LossInputs) -> torch.Tensor:
    """[T]: exp(logp - old_logp), the exponent clamped to [-20, 20]; 1 on tokens that are not trained on."""
    return ratio_to(inputs, inputs.old_logprobs_T)


def ratio_to(inputs: LossInputs, anchor_T: torch.Tensor) -> torch.Tensor:
    """[T]: exp(logp - anchor), the exponent clamped to [-20, 20]; 1 on tokens that are not trained on."""
    return log_ratio_to(inputs, anchor_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def log_ratio_to(inputs: LossInputs, anchor_T: torch.Tensor) -> torch.Tensor:
    """[T]: logp - anchor, 0 on tokens that are not trained on, where the anchor may be NaN."""
    return torch.where(inputs.loss_mask_T > 0, inputs.logprobs_T - anchor_T, torch.zeros_like(inputs.logprobs_T))


def clipped_surrogate(ratio_T: torch.Tensor, advantages_T: torch.Tensor, algorithm: Any) -> TokenLoss:
    """-min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A), and clip_ratio: the share of tokens whose clipped
    branch is the one taken."""
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high) * advantages_T
    return TokenLoss(torch.maximum(plain_T, clipped_T), {"clip_ratio": (clipped_T > plain_T).detach()})
