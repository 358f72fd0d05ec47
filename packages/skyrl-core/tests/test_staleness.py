"""The arithmetic of staleness and capacity, by hand-computed cases."""

from __future__ import annotations

import numpy as np
import pytest
from skyrl.train.generator.trajectory import Trajectory, TrajectoryID
from skyrl.train.sources.staleness import capacity, oldest_version, staleness, step_of

VERSIONS = {4: 11, 5: 12, 6: 15}  # a run that was resumed at step 4, on a server that others used before


def trajectory(*versions: int) -> Trajectory:
    n = len(versions)
    sampled = np.array([float(v >= 0) for v in versions], np.float32)
    tokens = np.arange(n, dtype=np.int32)
    zeros = np.zeros(n, np.float32)
    return Trajectory(TrajectoryID("0", 0), tokens, tokens, sampled, zeros, zeros, np.array(versions), "stop")


def test_the_oldest_sampled_token_of_any_sample_counts() -> None:
    assert oldest_version([trajectory(15, 15), trajectory(-1, 12, -1, 15)]) == 12


@pytest.mark.parametrize(("version", "step"), [(11, 4), (12, 5), (13, 5), (14, 5), (15, 6), (16, 6), (3, 4)])
def test_a_version_belongs_to_the_last_step_that_was_published_before_it(version: int, step: int) -> None:
    assert step_of(version, VERSIONS) == step


@pytest.mark.parametrize(
    ("versions", "step", "expected"), [((15,), 7, 0), ((15, 12), 7, 1), ((11, 15), 7, 2), ((11,), 5, 0)]
)
def test_a_group_is_as_old_as_the_steps_between_its_oldest_token_and_the_policy(
    versions: tuple[int, ...], step: int, expected: int
) -> None:
    assert staleness([trajectory(*versions)], VERSIONS, step=step) == expected


@pytest.mark.parametrize(
    ("last_step", "accepted", "running", "workers", "expected"),
    [
        (1, 0, 0, 8, 4),  # no staleness, step 1 of 4 groups
        (1, 4, 0, 8, 0),  # they are there: nothing more until the weights have moved
        (3, 0, 0, 8, 8),  # two steps ahead: 12 groups, of which 8 have a worker
        (3, 0, 8, 8, 0),
        (3, 5, 5, 8, 2),
        (3, 12, 3, 16, 0),  # never negative
    ],
)
def test_as_many_groups_are_begun_as_the_bound_and_the_workers_allow(
    last_step: int, accepted: int, running: int, workers: int, expected: int
) -> None:
    found = capacity(last_step=last_step, groups_per_step=4, accepted=accepted, running=running, workers=workers)
    assert found == expected
