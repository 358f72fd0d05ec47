"""Which prompts a step trains on where those whose samples all got the same reward teach nothing.

`filter` (DAPO, arXiv 2503.14476, section 3.2) samples further batches until enough useful prompts are there; `replace`
(POLARIS, WebSailor) puts copies of useful prompts in the place of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl.train.algorithms.tables import Table
from skyrl.train.failures import RunFailed
from skyrl.train.generator.trajectory import PromptTask, Trajectory, TrajectoryID

KEY = "trainer.algorithm.dynamic_sampling"

Group = list[Trajectory]


class DynamicSampling:
    """The sampling of one step, from batches of `batch_size` prompts. Give it the tasks of a batch (`ask`), then their
    trajectories (`take`), until `trajectories` is there.

    A prompt that is asked again in the same step, or copied, becomes a group of its own: its uid gets a number, as in
    `17#2`, so that its samples are drawn anew and no statistic mixes it with the first. Nothing is kept between steps.
    """

    def __init__(self, settings: Any, *, batch_size: int, seed: int) -> None:
        self.settings, self.batch_size, self.seed = settings, batch_size, seed
        self.trajectories: list[Trajectory] | None = None
        self.metrics: dict[str, float] = {}
        self._uses: Counter[str] = Counter()
        self._kept: list[Group] = []
        self._batches = self._prompts = self._useful = 0
        self._rewards: list[float] = []

    def ask(self, tasks: Sequence[PromptTask]) -> list[PromptTask]:
        """The same prompts, under uids that this step has not used yet. RunFailed after `max_sample_batches`."""
        if self._batches == self.settings.max_sample_batches:
            raise RunFailed(
                f"{KEY}.type={self.settings.type}: only {self._useful} of {self._prompts} prompts in {self._batches} "
                f"batches have samples with different rewards, too few for a batch of {self.batch_size}: raise "
                f"{KEY}.max_sample_batches or generator.n_samples_per_prompt, or take prompts that the policy neither "
                f"always nor never solves"
            )
        self._batches += 1
        return [replace(task, uid=self._fresh(task.uid)) for task in tasks]

    def take(self, trajectories: Sequence[Trajectory]) -> None:
        """The trajectories of what `ask` returned last."""
        groups = grouped(trajectories)
        self._prompts += len(groups)
        self._useful += sum(map(is_useful, groups))
        self._rewards += [t.total_reward for t in trajectories]
        strategy = DYNAMIC_SAMPLING.pick(self.settings.type)
        self._kept, enough = strategy(self, self._kept, groups)
        if enough:
            self.trajectories = [t for group in self._kept for t in group]
            self.metrics = {
                "dynamic_sampling/num_batches": float(self._batches),
                "dynamic_sampling/num_prompts": float(self._prompts),
                "dynamic_sampling/num_useful_prompts": float(self._useful),
                "dynamic_sampling/avg_raw_reward": sum(self._rewards) / len(self._rewards),
            }

    def copy_of(self, group: Group) -> Group:
        """The group again, as a group of its own."""
        uid = self._fresh(group[0].id.uid.partition("#")[0])
        return [replace(t, id=TrajectoryID(uid, t.id.repetition)) for t in group]

    def _fresh(self, uid: str) -> str:
        self._uses[uid] += 1
        return uid if self._uses[uid] == 1 else f"{uid}#{self._uses[uid]}"


def keep_useful(sampling: DynamicSampling, kept: list[Group], new: list[Group]) -> tuple[list[Group], bool]:
    """The useful groups of all batches, in order, and whether they fill a batch; what is beyond it is dropped."""
    kept = kept + [group for group in new if is_useful(group)]
    return kept[: sampling.batch_size], len(kept) >= sampling.batch_size


def replace_useless(sampling: DynamicSampling, _kept: list[Group], new: list[Group]) -> tuple[list[Group], bool]:
    """The batch with each useless group replaced by a copy of a useful one, each at most once while there are enough;
    nothing where no more than `min_replace_ratio` of them is useful: then the next batch is sampled."""
    useful = [group for group in new if is_useful(group)]
    missing = len(new) - len(useful)
    if not missing:
        return new, True
    if len(useful) <= len(new) * sampling.settings.min_replace_ratio:
        return [], False
    rng = np.random.Generator(np.random.PCG64(sampling.seed))
    chosen = iter(rng.permutation(len(useful)) if missing <= len(useful) else rng.integers(len(useful), size=missing))
    return [group if is_useful(group) else sampling.copy_of(useful[next(chosen)]) for group in new], True


Strategy = Callable[[DynamicSampling, list[Group], list[Group]], tuple[list[Group], bool]]
DYNAMIC_SAMPLING: Table[Strategy] = Table(f"{KEY}.type", {"filter": keep_useful, "replace": replace_useless})


def grouped(trajectories: Sequence[Trajectory]) -> list[Group]:
    """The samples of each prompt, prompts in order of first appearance."""
    groups: dict[str, Group] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.id.uid, []).append(trajectory)
    return list(groups.values())


def is_useful(group: Group, *, tolerance: float = 0.0) -> bool:
    """Whether the total rewards of its samples differ, by more than `tolerance`; a single sample always counts as
    useful."""
    rewards = [t.total_reward for t in group]
    return len(rewards) == 1 or max(rewards) - min(rewards) > tolerance
