"""Soft adaptive policy optimisation: a smooth gate instead of a clip."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss, policy_ratio


def sapo(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """SAPO (arXiv 2511.20347), meant for `loss_reduction=sequence_mean`:

        -A sigmoid(tau (r - 1)) 4 / tau,   r = exp(logp - old_logp)

    with tau = `tau_pos` where A > 0 and `tau_neg` elsewhere. At r = 1 its gradient is that of -r A. Nothing is clipped:
    clip_ratio is 0.
    """
    ratio_T = policy_ratio(inputs)
    positive = torch.full_like(ratio_T, algorithm.sapo.tau_pos)
    negative = torch.full_like(ratio_T, algorithm.sapo.tau_neg)
    tau_T = torch.where(inputs.advantages_T > 0, positive, negative)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return TokenLoss(-gate_T * inputs.advantages_T, {"clip_ratio": torch.zeros_like(ratio_T).detach()})
