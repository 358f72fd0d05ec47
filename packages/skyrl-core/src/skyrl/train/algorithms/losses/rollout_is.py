"""Importance sampling against the servers' own policy, without tokens whose ratio is too far from 1."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss, ratio_to


def rollout_is(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """For rollouts of older weights (asynchronous training), where r = exp(logp - rollout_logp):

        -sg[r if 1 - eps_clip_low < r < 1 + eps_clip_high else 0] A logp

    clip_ratio: the share of tokens outside the bounds.
    """
    ratio_T = ratio_to(inputs, inputs.rollout_logprobs_T).detach()
    inside_T = (ratio_T > 1 - algorithm.eps_clip_low) & (ratio_T < 1 + algorithm.eps_clip_high)
    weight_T = torch.where(inside_T, ratio_T, torch.zeros_like(ratio_T))
    return TokenLoss(-weight_T * inputs.advantages_T * inputs.logprobs_T, {"clip_ratio": ~inside_T})
