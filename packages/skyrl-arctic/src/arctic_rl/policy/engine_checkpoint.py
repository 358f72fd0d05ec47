"""What a DeepSpeed rank writes so that training goes on bit for bit, and which file is to blame if it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from skyrl.train.policy.contract import WorkerPlace
from skyrl.train.policy.fsdp.checkpoint import random_state, require_whole, set_random_state, unique_tensors

from arctic_rl.policy.engine import whole_shape

TAG = "engine"
MADE_BY = "made_by.json"


def save(folder: Path, place: WorkerPlace, engine: Any) -> None:
    """DeepSpeed's own files under `engine/`, this rank's random state, and who made them (collective)."""
    folder.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    torch.save(random_state(place.device), random_file(folder, place))
    if place.rank == 0:
        (folder / MADE_BY).write_text(json.dumps(describe(engine, place), indent=1), encoding="utf-8")
    dist.barrier()


def load(folder: Path, place: WorkerPlace, engine: Any) -> None:
    """Restores what `save` wrote (collective). ValueError names the file that is missing, damaged or of another run."""
    require_same_maker(folder / MADE_BY, describe(engine, place))
    for path in (random_file(folder, place), *sorted((folder / TAG).glob("*.pt"))):
        require_exists(path)
        require_whole(path)
    loaded, _ = engine.load_checkpoint(str(folder), tag=TAG)
    if loaded is None:
        raise ValueError(f"{folder / TAG} holds no DeepSpeed checkpoint: resume from another global_step_N folder")
    # it holds tuples and numpy arrays, so the safe unpickler does not do
    set_random_state(torch.load(random_file(folder, place), weights_only=False), place.device)
    dist.barrier()


def random_file(folder: Path, place: WorkerPlace) -> Path:
    """This rank's random state."""
    return folder / f"random_state_world_size_{place.world_size}_rank_{place.rank}.pt"


def describe(engine: Any, place: WorkerPlace) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit."""
    return {
        "world_size": place.world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "tensors": {name: list(whole_shape(tensor)) for name, tensor in unique_tensors(engine.module)},
    }


def require_same_maker(path: Path, ours: dict[str, Any]) -> None:
    """ValueError unless `path` describes a checkpoint of as many workers, of the same stage and of the same model."""
    require_exists(path)
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): resume from another global_step_N folder") from None
    if theirs.get("world_size") != ours["world_size"]:
        raise ValueError(
            f"{path}: saved by {theirs.get('world_size')} workers, this run has {ours['world_size']}: resume with as "
            f"many workers as saved it"
        )
    if theirs.get("zero_stage") != ours["zero_stage"]:
        raise ValueError(
            f"{path}: saved with trainer.arctic_rl.zero_stage={theirs.get('zero_stage')}, this run has "
            f"{ours['zero_stage']}: resume with the stage that saved it"
        )
    stored = theirs.get("tensors", {})
    for name, shape in ours["tensors"].items():
        if stored.get(name) != shape:
            raise ValueError(
                f"{path}: {name} is {stored.get(name, 'missing')}, the model needs {shape}: the checkpoint is of "
                f"another model"
            )


def require_exists(path: Path) -> None:
    """ValueError unless there is such a file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: expected a checkpoint saved by trainer.backend=arctic_rl")
