"""What a rank writes so that training goes on bit for bit: its shards, its optimizer, its schedule and random state."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from skyrl.train.policy.contract import WorkerPlace

KINDS = ("model", "optim", "extra_state")


def file_of(folder: Path, kind: str, place: WorkerPlace) -> Path:
    """Where this rank keeps that kind of state."""
    return folder / f"{kind}_world_size_{place.world_size}_rank_{place.rank}.pt"


def save(folder: Path, place: WorkerPlace, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
    """Three files per rank; returns when every rank has written its own."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({name: _local(t) for name, t in unique_tensors(model)}, file_of(folder, "model", place))
    state = optimizer.state_dict()
    state["state"] = {i: {k: _local(v) for k, v in slot.items()} for i, slot in state["state"].items()}
    torch.save(state, file_of(folder, "optim", place))
    extra = {"schedule": schedule.state_dict(), "random": random_state(place.device)}
    torch.save(extra, file_of(folder, "extra_state", place))
    dist.barrier()


def load(folder: Path, place: WorkerPlace, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
    """Restores what `save` wrote. ValueError names a missing file, another world size or a tensor that does not fit."""
    stored = read(folder, "model", place)
    for name, tensor in unique_tensors(model):
        local = _local(tensor)
        if name not in stored or stored[name].shape != local.shape:
            there = tuple(stored[name].shape) if name in stored else "missing"
            raise ValueError(
                f"{file_of(folder, 'model', place)}: {name} is {there}, the model needs {tuple(local.shape)}: "
                f"the checkpoint is of another model"
            )
        with torch.no_grad():
            local.copy_(stored[name])
    optimizer.load_state_dict(_sharded_like(read(folder, "optim", place), optimizer))
    extra = read(folder, "extra_state", place)
    schedule.load_state_dict(extra["schedule"])
    set_random_state(extra["random"], place.device)
    dist.barrier()


def read(folder: Path, kind: str, place: WorkerPlace) -> Any:
    """What this rank saved. ValueError names a file that is missing or damaged."""
    path = file_of(folder, kind, place)
    if not path.is_file():
        others = sorted(p.name for p in folder.glob(f"{kind}_world_size_*")) if folder.is_dir() else []
        raise ValueError(f"{path} is missing (found: {others or 'none'}): resume with as many workers as saved it")
    require_whole(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def require_whole(path: Path) -> None:
    """ValueError unless every byte is as torch wrote it; it reads the file once, to compare its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged ({error}): resume from another checkpoint") from None
    if damaged is not None:
        raise ValueError(f"{path} is damaged (checksum of {damaged}): resume from another checkpoint")


def unique_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under the model's own names, tied ones once, in one order on every rank."""
    seen: set[int] = set()
    out = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            out.append((name, tensor))
    return out


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch, numpy, Python and the device, as tensors and numbers, which the safe unpickler reads."""
    kind, words, *rest = np.random.get_state(legacy=True)
    numpy_state = (kind, torch.from_numpy(np.asarray(words, np.int64)), *rest)
    state = {"torch": torch.get_rng_state(), "numpy": numpy_state, "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local().detach()
    return value.detach() if isinstance(value, torch.Tensor) else value


def _sharded_like(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The stored local moments as shards of their parameters again."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, slot in state["state"].items():
        parameter = parameters[i]
        if not isinstance(parameter, DTensor):
            continue
        for name, value in slot.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                slot[name] = DTensor.from_local(
                    value.to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
    return state
