"""Keeps a float64 model in float64: transformers' RMS norms otherwise pass through float32."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn


def widen_norms(model: nn.Module) -> None:
    """Replaces the forward of every RMS norm of the usual form (weight * x / rms(x)). A float64 run exists to compare
    backends at 1e-12, which a float32 step in the middle forbids."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_rms_norm, module)


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    mean_square = hidden.square().mean(-1, keepdim=True)
    return module.weight * (hidden * torch.rsqrt(mean_square + module.variance_epsilon))
