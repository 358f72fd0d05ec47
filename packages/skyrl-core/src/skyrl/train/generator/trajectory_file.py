"""Trajectories as one file of plain arrays, for a checkpoint: what is read is what was written, token for token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from skyrl.train.generator.trajectory import Trajectory, TrajectoryID

ARRAYS = ("prompt_token_ids", "response_token_ids", "loss_mask", "rewards", "rollout_logprobs", "weight_versions")
OTHERS = tuple(f.name for f in fields(Trajectory) if f.name not in (*ARRAYS, "id"))


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """An .npz of each array over all trajectories, their lengths, and the rest as JSON; nothing is pickled.

    ValueError names a trajectory whose environment metrics or messages are no JSON.
    """
    columns: dict[str, Any] = {}
    for name in ARRAYS:
        arrays = [getattr(t, name) for t in trajectories]
        columns[name] = np.concatenate(arrays) if arrays else np.zeros(0)
        columns[f"{name}.lengths"] = np.array([len(a) for a in arrays], dtype=np.int64)
    rows = []
    for t in trajectories:
        try:
            row = [t.id.uid, t.id.repetition, {name: getattr(t, name) for name in OTHERS}]
            rows.append(json.dumps(row, default=_plain))
        except TypeError as error:
            raise ValueError(f"prompt {t.id.uid}, sample {t.id.repetition} cannot be kept: {error}") from error
    columns["rows"] = np.array(rows, dtype=np.str_)
    with path.open("wb") as file:
        np.savez(file, **columns)


def _plain(value: object) -> object:
    """A number of numpy as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r:.80} is no JSON")


def read_trajectories(path: Path) -> list[Trajectory]:
    """What `write_trajectories` wrote. ValueError where the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            cut = {name: np.split(file[name], np.cumsum(file[f"{name}.lengths"])[:-1]) for name in ARRAYS}
            rows = [json.loads(str(row)) for row in file["rows"]]
    except Exception as error:
        raise ValueError(f"{path} is damaged ({error}): resume from another global_step_N folder") from error
    out = []
    for i, (uid, repetition, others) in enumerate(rows):
        others["turn_num_tokens"] = tuple(others["turn_num_tokens"])
        arrays: dict[str, Any] = {name: cut[name][i] for name in ARRAYS}
        out.append(Trajectory(id=TrajectoryID(uid, repetition), **arrays, **others))
    return out
