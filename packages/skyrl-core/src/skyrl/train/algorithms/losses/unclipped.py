"""Losses without a trust region: supervised cross-entropy and plain importance sampling."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss, policy_ratio


def cross_entropy(inputs: LossInputs, _algorithm: Any) -> TokenLoss:
    """-logp: supervised fine-tuning on the sampled tokens, whatever their advantages.

    `loss_reduction` applies as for every loss; in public SkyRL it is folded into the advantages and so has no effect.
    """
    return TokenLoss(-inputs.logprobs_T, {"clip_ratio": torch.zeros_like(inputs.logprobs_T).detach()})


def importance_sampling(inputs: LossInputs, _algorithm: Any) -> TokenLoss:
    """-r A, r = exp(logp - old_logp) (REINFORCE with importance weights). importance_ratio: the mean of r.

    Off-policy correction applies as for every loss; public SkyRL drops it here without a word.
    """
    ratio_T = policy_ratio(inputs)
    return TokenLoss(-ratio_T * inputs.advantages_T, {"importance_ratio": ratio_T.detach()})
