"""PPO's clipped surrogate, and the same with a second clip for bad samples that became likely."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss, clipped_surrogate, policy_ratio


def regular(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476):

        -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A),   r = exp(logp - old_logp)

    clip_ratio: the share of tokens whose clipped branch is the one taken.
    """
    return clipped_surrogate(policy_ratio(inputs), inputs.advantages_T, algorithm)


def dual_clip(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """`regular`, and for A < 0 at most -A c with c = `clip_ratio_c` (arXiv 1912.09729, eq. 5)."""
    loss = regular(inputs, algorithm)
    ceiling_T = -inputs.advantages_T * algorithm.clip_ratio_c
    bounded_T = torch.minimum(loss.loss_T, ceiling_T)
    return TokenLoss(torch.where(inputs.advantages_T < 0, bounded_T, loss.loss_T), loss.metrics_T)
