"""Saving and loading the training state of all ranks of a role: tensors, schedule, random state, and their proof."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from skyrl.train.policy.checkpoint import contents, shards
from skyrl.train.policy.checkpoint.contents import Contents, TensorEntry
from skyrl.train.policy.checkpoint.random_state import draw_random_state, random_state, set_random_state
from skyrl.train.policy.contract import WorkerPlace

TENSORS = "tensors"


@dataclass(frozen=True)
class TrainingState:
    """One rank's view. `tensors` are live: saving reads them and loading fills them. `steps`: by tensor with moments.

    `tensors` has the kind "weights" and, with an optimizer, "exp_avg" and "exp_avg_sq".
    """

    made_by: str
    tensors: shards.Tensors
    steps: dict[str, int] = field(default_factory=dict)
    schedule_steps: int | None = None

    def entries(self) -> dict[str, TensorEntry]:
        """Shape, dtype and steps of every tensor."""
        weights = self.tensors["weights"]
        return {
            name: TensorEntry(shape=tuple(held.size()), dtype=dtype_name(held), steps=self.steps.get(name))
            for name, held in weights.items()
        }


def save(folder: Path, place: WorkerPlace, state: TrainingState) -> None:
    """Every rank writes its part; `contents.json` last (collective). OSError where a rank could not write."""
    folder.mkdir(parents=True, exist_ok=True)
    shards.write(folder / TENSORS, state.tensors)
    own = [f"{TENSORS}/{path.name}" for path in sorted((folder / TENSORS).glob(f"__{place.rank}_*"))]
    if place.rank == 0:
        own.append(f"{TENSORS}/{shards.INDEX}")
    if state.schedule_steps is not None:
        torch.save(random_state(place.device), folder / random_file(place.rank))
        own.append(random_file(place.rank))
    files: dict[str, contents.FileEntry] = {}
    for part in gathered(contents.digests(folder, own), place):
        files |= part
    require_shared(folder, files, place)
    if place.rank == 0:
        found = Contents(
            made_by=state.made_by,
            world_size=place.world_size,
            schedule_steps=state.schedule_steps,
            tensors=state.entries(),
            files=files,
        )
        contents.write(folder, found)
    dist.barrier()


def require_shared(folder: Path, files: Iterable[str], place: WorkerPlace) -> None:
    """OSError on all ranks where one does not see what the others wrote (collective): whoever loads needs all of it."""
    unseen = gathered(sum(not (folder / name).is_file() for name in files), place)
    blind = [rank for rank, number in enumerate(unseen) if number]
    if blind:
        raise OSError(
            f"{folder} is not one folder for all workers: ranks {blind} do not see what others wrote: give a "
            f"trainer.ckpt_path that all machines share"
        )


def load(folder: Path, place: WorkerPlace, state: TrainingState, *, seed: int) -> tuple[Contents, list[str]]:
    """Fills `state.tensors` and the random generators (collective); the caller sets steps and schedule from the result.

    Also: notes on what could not go on as it was. ValueError names the file that is missing, damaged or of another
    model; then nothing was changed, unless reading a file that was whole a moment ago failed.
    """
    found = checked(folder, place, state)
    if found.schedule_steps is None:
        raise ValueError(f"{folder} holds weights without an optimizer: {contents.ANOTHER}")
    shards.read(folder / TENSORS, state.tensors)
    notes = dtype_notes(found, state)
    if found.world_size == place.world_size:
        set_random_state(_random_numbers(folder / random_file(place.rank)), place.device)
    else:
        draw_random_state(seed, updates=found.schedule_steps, rank=place.rank)
        notes.append(
            f"saved by {found.world_size} worker(s), resumed by {place.world_size}: their random generators start from "
            f"trainer.seed, the step and the rank"
        )
    return found, notes


def load_weights(folder: Path, place: WorkerPlace, state: TrainingState) -> None:
    """Fills the kind "weights" alone (collective). ValueError as in `load`."""
    checked(folder, place, state)
    shards.read(folder / TENSORS, {"weights": state.tensors["weights"]})


def checked(folder: Path, place: WorkerPlace, state: TrainingState) -> Contents:
    """The contents of a folder whose every file is whole and whose tensors are the model's (collective); each rank
    reads its share of the files. ValueError on all ranks where any finds one that is not."""
    found = contents.read(folder)
    contents.require_same_tensors(folder, found.tensors, {n: e.shape for n, e in state.entries().items()})
    names = sorted(found.files)[place.rank :: place.world_size]
    problems = [
        sentence
        for part in gathered(contents.damage(folder, {name: found.files[name] for name in names}), place)
        for sentence in part
    ]
    if problems:
        raise ValueError(f"{'; '.join(sorted(problems))}: {contents.ANOTHER}")
    return found


def dtype_notes(found: Contents, state: TrainingState) -> list[str]:
    """A sentence where the model here is of another precision than the stored one."""
    ours = {entry.dtype for entry in state.entries().values()}
    theirs = {entry.dtype for entry in found.tensors.values()}
    if ours == theirs:
        return []
    return [f"stored in {', '.join(sorted(theirs))}, continued in {', '.join(sorted(ours))}: values are converted"]


def random_file(rank: int) -> str:
    """The file of a rank's random generators."""
    return f"random_{rank}.pt"


def gathered(value: Any, place: WorkerPlace) -> list[Any]:
    """Every rank's value, by rank (collective)."""
    if place.world_size == 1:
        return [value]
    out: list[Any] = [None] * place.world_size
    dist.all_gather_object(out, value)
    return out


def dtype_name(held: Any) -> str:
    """float32, bfloat16, ... of a tensor or a stretch of one."""
    values = held if isinstance(held, torch.Tensor) else held.values
    return str(values.dtype).removeprefix("torch.")


def _random_numbers(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {contents.ANOTHER}") from error
