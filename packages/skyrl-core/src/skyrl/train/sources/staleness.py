"""How many steps old a group is, from the weight versions that its tokens carry, and how many groups may be begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl.train.generator.trajectory import Trajectory


def oldest_version(group: Sequence[Trajectory]) -> int:
    """The oldest weights that sampled any token of these trajectories."""
    return min(int(t.weight_versions[t.weight_versions >= 0].min()) for t in group)


def step_of(version: int, version_of_step: Mapping[int, int]) -> int:
    """The last step whose weights a server with `version` can have: steps are published as growing versions. The first
    known step where the version is older than all of them."""
    reached = [step for step, published in version_of_step.items() if published <= version]
    return max(reached, default=min(version_of_step))


def staleness(group: Sequence[Trajectory], version_of_step: Mapping[int, int], *, step: int) -> int:
    """Updates between the oldest token of a group and the policy that `step` begins with, which is that of step - 1: 0
    where every token is the policy's own."""
    return step - 1 - step_of(oldest_version(group), version_of_step)


def capacity(*, last_step: int, groups_per_step: int, accepted: int, running: int, workers: int) -> int:
    """Groups that may be begun now, where groups for the steps up to `last_step` may be made and `accepted` of all
    groups so far are trained on or ready:

        min(workers - running, last_step groups_per_step - (accepted + running))

    With last_step = step + max_staleness, a group that is begun while `step` trains and overtaken by none is trained on
    at most max_staleness steps later.
    """
    return max(0, min(workers - running, last_step * groups_per_step - (accepted + running)))
