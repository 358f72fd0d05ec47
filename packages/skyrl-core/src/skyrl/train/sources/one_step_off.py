"""Rollouts one batch ahead (`trainer.mode=one_step_off`): while a step trains, the next one's samples are made.

Weights move between batches only, so that each batch has one version and the run depends on no clock:

    batch s + 1 is sampled with the weights of step s - 1, and trained on by the policy of step s
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.train.generator.trajectory import Trajectory
from skyrl.train.generator.trajectory_file import read_trajectories, write_trajectories
from skyrl.train.sources.source import Collects, RolloutSource
from skyrl.train.waits import end

AHEAD = "rollouts_ahead.npz"


class OneStepOff(RolloutSource):
    """Keeps one batch on its way, from the first `take` to the last step."""

    def __init__(self, trainer: Collects) -> None:
        super().__init__(trainer)
        self._ahead: asyncio.Task[list[Trajectory]] | None = None
        self._step_ahead = 0
        self._before_ahead: Mapping[str, int] = {}
        self._kept: list[Trajectory] | None = None  # of a checkpoint
        self._waits = False

    async def take(self, step: int) -> list[Trajectory]:
        """The batch that was made during the step before; the next one is then begun."""
        if self._kept is not None:
            trajectories, self._kept = self._kept, None
        else:
            trajectories = await self._arrived(self._ahead or self._begin(step), f"the rollouts of step {step}")
        self._ahead = None
        if step < self.trainer.total_steps and not self.trainer.prompts_used_up:
            self._begin(step + 1)
        return trajectories

    def moved(self, done: int, total: int) -> None:
        self.patience.moved()
        if self._waits:
            self.trainer.progress.waiting_for(f"rollouts of step {self._step_ahead} {done}/{total}")

    async def before_publish(self) -> None:
        """Waits for the end of the batch that is being made: it has the weights that it began with."""
        if self._ahead is not None:
            await self._arrived(self._ahead, f"the rollouts of step {self._step_ahead}, before new weights")

    @property
    def used_up(self) -> bool:
        return self._ahead is None and self._kept is None and self.trainer.prompts_used_up

    def trained_through(self) -> Mapping[str, int]:
        return super().trained_through() if self._ahead is None else self._before_ahead

    def metrics(self) -> dict[str, float]:
        return {
            "async/num_batches_ahead": float(self._ahead is not None),
            "trainer/epoch": float(self.trained_through()["epoch"]),
        }

    def save(self, folder: Path) -> None:
        """The batch that is made already: its weights are gone, it could not be made again."""
        if self._ahead is not None:
            write_trajectories(folder / AHEAD, self._ahead.result())

    def load(self, state: dict[str, Any], folder: Path) -> None:
        if (folder / AHEAD).is_file():
            self._kept = read_trajectories(folder / AHEAD)

    async def close(self) -> None:
        await end([self._ahead] if self._ahead else [], name="the batches ahead")

    def _begin(self, step: int) -> asyncio.Task[list[Trajectory]]:
        self._step_ahead, self._before_ahead = step, super().trained_through()
        self._ahead = asyncio.create_task(self.trainer.collect_batch(step), name=f"rollouts of step {step}")
        return self._ahead

    async def _arrived(self, batch: asyncio.Task[list[Trajectory]], name: str) -> list[Trajectory]:
        self._waits = True
        try:
            return await self.patience.wait(batch, name=name)
        finally:
            self._waits = False
