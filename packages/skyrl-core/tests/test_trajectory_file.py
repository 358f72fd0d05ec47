"""What is read of kept rollouts is what was written; a damaged file is named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from skyrl.train.generator.trajectory import Trajectory, TrajectoryID
from skyrl.train.generator.trajectory_file import read_trajectories, write_trajectories


def trajectory(uid: str, n: int, **others: object) -> Trajectory:
    return Trajectory(
        TrajectoryID(uid, 1),
        prompt_token_ids=np.arange(3, dtype=np.int32),
        response_token_ids=np.arange(n, dtype=np.int32),
        loss_mask=np.ones(n, np.float32),
        rewards=np.linspace(0, 1, n, dtype=np.float32),
        rollout_logprobs=np.full(n, np.nan, np.float32),
        weight_versions=np.full(n, 2**40, np.int64),
        stop_reason="length",
        **others,  # type: ignore[arg-type]
    )


def test_every_field_comes_back(tmp_path: Path) -> None:
    written = [
        trajectory("7#2", 5, turn_num_tokens=(2, 3), messages=[{"role": "user", "content": "ü\n"}], data_source="a/b"),
        trajectory("8", 1, env_metrics={"turns": np.int64(3), "share": 0.1}, seconds={"llm": 1.5}),
    ]
    write_trajectories(tmp_path / "kept.npz", written)
    for found, expected in zip(read_trajectories(tmp_path / "kept.npz"), written, strict=True):
        for field in fields(Trajectory):
            here, there = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(there, np.ndarray):
                assert here.dtype == there.dtype
                np.testing.assert_array_equal(here, there)
            else:
                assert here == there, field.name


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kept.npz"
    write_trajectories(file, [trajectory("7", 5)])
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"kept\.npz is damaged .*: resume from another global_step_N folder"):
        read_trajectories(file)


def test_what_is_no_json_is_named_by_its_sample(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt 7, sample 1 cannot be kept"):
        write_trajectories(tmp_path / "kept.npz", [trajectory("7", 5, env_metrics={"judge": object()})])
