"""Clipped importance-sampling weights: every token keeps its gradient, with a bounded weight."""

from __future__ import annotations

from typing import Any

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss, ratio_to


def cispo(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585):

        -A sg[clip(r, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)] logp,   r = exp(logp - anchor)

    `cispo_anchor`: the policy before the update, or the servers' sampling policy. clip_ratio: the share of tokens whose
    ratio lies outside the bounds; cispo/ratio_*: the ratio itself, over trained tokens only (in public SkyRL the
    extremes once counted masked tokens as 0).
    """
    settings = algorithm.cispo
    anchor_T = inputs.rollout_logprobs_T if settings.cispo_anchor == "rollout" else inputs.old_logprobs_T
    ratio_T = ratio_to(inputs, anchor_T).detach()
    low, high = 1 - settings.cispo_eps_clip_low, 1 + settings.cispo_eps_clip_high
    weight_T = ratio_T.clamp(low, high)
    metrics_T = {
        "clip_ratio": (ratio_T < low) | (ratio_T > high),
        "cispo/ratio_mean": ratio_T,
        "cispo/ratio_clamped_mean": weight_T,
        "cispo/ratio_max": ratio_T,
        "cispo/ratio_min": ratio_T,
    }
    return TokenLoss(-inputs.advantages_T * weight_T * inputs.logprobs_T, metrics_T)
