"""One optimizer step: global norm, clipping, AdamW, schedule; a non-finite gradient changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler


def build_optimizer(
    parameters: Iterable[nn.Parameter], optimizer_config: Any, *, total_steps: int, role: str = "policy"
) -> tuple[AdamW, LRScheduler]:
    """AdamW (arXiv 1711.05101, decay on every parameter) and the named transformers schedule over `total_steps`."""
    optimizer = AdamW(
        parameters,
        lr=optimizer_config.lr,
        betas=tuple(optimizer_config.adam_betas),
        weight_decay=optimizer_config.weight_decay,
        fused=True,
    )
    try:
        schedule = get_scheduler(
            optimizer_config.scheduler,
            optimizer,
            num_warmup_steps=optimizer_config.num_warmup_steps,
            num_training_steps=total_steps,
        )
    except ValueError as error:
        raise ValueError(f"trainer.{role}.optimizer_config.scheduler: {error}") from None
    return optimizer, schedule


def clipped_step(
    parameters: list[nn.Parameter], optimizer: AdamW, schedule: LRScheduler, *, max_grad_norm: float
) -> tuple[float, float]:
    """(norm before clipping, learning rate of this step). A norm that is not finite leaves weights, moments and
    schedule as they are; gradients are dropped either way."""
    learning_rate = optimizer.param_groups[0]["lr"]
    norm = total_norm([p.grad for p in parameters if p.grad is not None])
    if math.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, torch.tensor(norm, device=_device(parameters)))
        optimizer.step()
        schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, float(learning_rate)


def total_norm(gradients: list[torch.Tensor]) -> float:
    """The 2-norm over all gradients on all ranks."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _device(parameters: list[nn.Parameter]) -> torch.device:
    return parameters[0].device
