"""How the metrics of micro-batches, and then of ranks, become those of the mini-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch


def combine(shares: Sequence[Mapping[str, torch.Tensor | float]]) -> dict[str, float]:
    """Adds each metric up over all shares that have it; one whose name ends in `_max` or `_min` is the largest or
    smallest of them, and is left out where no share had any token."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for share in shares for name in share):
        values = torch.stack([torch.as_tensor(share[name], dtype=torch.float64) for share in shares if name in share])
        if name.endswith(("_max", "_min")):
            value = float(values.max() if name.endswith("_max") else values.min())
            if not math.isinf(value):
                out[name] = value
        else:
            out[name] = float(values.sum())
    return out


def extreme(name: str, values_T: torch.Tensor, trained_T: torch.Tensor) -> torch.Tensor:
    """The largest (`_max`) or smallest (`_min`) value of the trained tokens, -inf or inf where there are none."""
    sign = 1.0 if name.endswith("_max") else -1.0
    signed_T = torch.where(trained_T, sign * values_T, torch.full_like(values_T, -math.inf))
    return sign * signed_T.max() if values_T.numel() else signed_T.new_tensor(-sign * math.inf)
