"""Divergence proximal policy optimisation: the trust region is a divergence of probabilities, not a ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss, ratio_to
from skyrl.train.algorithms.tables import Table

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

EPS = 1e-8


def dppo(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """DPPO (arXiv 2602.04879, eq. 13 and 14) with the servers' sampling policy mu as the anchor (section 5.2):

        -m r A,   r = pi(a) / mu(a)

    m is 0 where the update would move the token further away than the divergence D allows: A > 0, pi(a) > mu(a) and
    D > `delta_high`, or A < 0, pi(a) < mu(a) and D > `delta_low`; else 1. clip_ratio: the share of tokens with m = 0.
    """
    logprobs_T, trained_T = inputs.logprobs_T.detach(), inputs.loss_mask_T > 0
    anchor_T = torch.where(trained_T, inputs.rollout_logprobs_T, logprobs_T)
    divergence_T = DIVERGENCES.pick(algorithm.dppo.dppo_type)(logprobs_T, anchor_T)
    too_high_T = (logprobs_T > anchor_T) & (divergence_T > algorithm.dppo.delta_high)
    too_low_T = (logprobs_T < anchor_T) & (divergence_T > algorithm.dppo.delta_low)
    dropped_T = torch.where(inputs.advantages_T > 0, too_high_T, (inputs.advantages_T < 0) & too_low_T)
    loss_T = -ratio_to(inputs, inputs.rollout_logprobs_T) * inputs.advantages_T
    return TokenLoss(torch.where(dropped_T, torch.zeros_like(loss_T), loss_T), {"clip_ratio": dropped_T})


def binary_tv(logprobs_T: torch.Tensor, anchor_T: torch.Tensor) -> torch.Tensor:
    """|pi(a) - mu(a)|: the total variation between "this token" and "any other" (eq. 13)."""
    return (logprobs_T.exp() - anchor_T.exp()).abs()


def binary_kl(logprobs_T: torch.Tensor, anchor_T: torch.Tensor) -> torch.Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu + 1e-8) / (1 - pi + 1e-8)), of mu(a) and pi(a) (eq. 14)."""
    pi_T, mu_T = logprobs_T.exp(), anchor_T.exp()
    return mu_T * (anchor_T - logprobs_T) + (1 - mu_T) * torch.log((1 - mu_T + EPS) / (1 - pi_T + EPS))


DIVERGENCES: Table[Divergence] = Table(
    "trainer.algorithm.dppo.dppo_type", {"binary_tv": binary_tv, "binary_kl": binary_kl}
)
