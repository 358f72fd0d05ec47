"""AdamW's moments and step counts, and the schedule's position: what is taken out of an optimizer and put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


def with_moments(optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
    """Gives every tensor that was never stepped the state that its first step would start from: zeros, at step 0."""
    for tensor in tensors:
        state = optimizer.state[tensor]
        if not state:
            state[STEP] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            state |= {name: torch.zeros_like(tensor) for name in MOMENTS}


def moments(optimizer: Optimizer, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """exp_avg and exp_avg_sq of a tensor, live."""
    return {name: optimizer.state[tensor][name] for name in MOMENTS}


def steps_done(optimizer: Optimizer, tensor: torch.Tensor) -> int:
    """How many updates the tensor's moments have seen."""
    return int(optimizer.state[tensor][STEP])


def set_steps(optimizer: Optimizer, tensor: torch.Tensor, steps: int) -> None:
    """Restores `steps_done`."""
    optimizer.state[tensor][STEP].fill_(float(steps))


def set_schedule(schedule: Any, steps: int) -> None:
    """Puts a schedule after `steps` updates: its learning rate is a function of their number and the settings alone."""
    assert isinstance(schedule, LambdaLR)
    schedule.last_epoch, schedule._step_count = steps, steps + 1
    rates = [base * shape(steps) for base, shape in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
