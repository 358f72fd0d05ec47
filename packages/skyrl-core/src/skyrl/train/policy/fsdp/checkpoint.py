"""The training state of an FSDP2 rank, as `policy.checkpoint` stores it: its shards, AdamW's moments, the schedule."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from skyrl.train.policy.checkpoint import training_state
from skyrl.train.policy.checkpoint.moments import MOMENTS, moments, set_schedule, set_steps, steps_done, with_moments
from skyrl.train.policy.checkpoint.training_state import TrainingState
from skyrl.train.policy.contract import WorkerPlace

MADE_BY = "fsdp"


def save(folder: Path, place: WorkerPlace, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
    """Everything that training needs to go on (collective)."""
    training_state.save(folder, place, _state(model, optimizer, schedule))


def load(
    folder: Path, place: WorkerPlace, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, *, seed: int
) -> list[str]:
    """Restores what any number of ranks of any backend saved (collective); see `training_state.load`."""
    found, notes = training_state.load(folder, place, _state(model, optimizer, schedule), seed=seed)
    for name, tensor in trained(model).items():
        set_steps(optimizer, tensor, found.tensors[name].steps or 0)
    set_schedule(schedule, found.schedule_steps or 0)
    return notes


def save_weights(folder: Path, place: WorkerPlace, model: nn.Module) -> None:
    """All weights, trained or not, and nothing else (collective)."""
    training_state.save(folder, place, TrainingState(MADE_BY, {"weights": _detached(dict(unique_tensors(model)))}))


def load_weights(folder: Path, place: WorkerPlace, model: nn.Module) -> None:
    """Restores what `save_weights` of any backend wrote (collective), in the model's own precision."""
    state = TrainingState(MADE_BY, {"weights": _detached(dict(unique_tensors(model)))})
    training_state.load_weights(folder, place, state)


def unique_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under the model's own names, tied ones once, in one order on every rank."""
    seen: set[int] = set()
    out = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            out.append((name, tensor))
    return out


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: all that training changes. Frozen parameters are those of the model's folder."""
    return {n: t for n, t in unique_tensors(model) if t.requires_grad or not isinstance(t, nn.Parameter)}


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that the optimizer updates."""
    return {name: tensor for name, tensor in unique_tensors(model) if tensor.requires_grad}


def _state(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> TrainingState:
    parameters = trained(model)
    with_moments(optimizer, parameters.values())
    kinds = {kind: {n: moments(optimizer, t)[kind] for n, t in parameters.items()} for kind in MOMENTS}
    return TrainingState(
        made_by=MADE_BY,
        tensors={"weights": _detached(stored_tensors(model)), **kinds},
        steps={name: steps_done(optimizer, tensor) for name, tensor in parameters.items()},
        schedule_steps=schedule.last_epoch,
    )


def _detached(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
