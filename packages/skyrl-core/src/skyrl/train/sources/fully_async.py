"""Rollouts that never stop (`trainer.mode=fully_async`): groups are made while the policy trains on earlier ones.

The bound on staleness holds for every group that is trained on, counted from the versions that its tokens carry: an
older group is thrown away and counted, and its prompt is sampled anew. New weights wait for no rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl.train.algorithms.dynamic_sampling import is_useful
from skyrl.train.generator.draft import require_versions
from skyrl.train.generator.drops import NothingLeft
from skyrl.train.generator.trajectory import Trajectory, TrajectoryID
from skyrl.train.sources import staleness
from skyrl.train.sources.source import Collects, PromptsUsedUp, RolloutSource
from skyrl.train.sources.tickets import Ticket, Tickets
from skyrl.train.waits import end


@dataclass(frozen=True, eq=False)
class Group:
    """All samples of one prompt, finished."""

    ticket: Ticket
    trajectories: list[Trajectory]
    oldest_version: int


class FullyAsync(RolloutSource):
    """Groups run as tasks, at most as many as `staleness.capacity` allows; each end and each publish may begin more.

    The first that fails ends the run with its own error. With `environment.on_error=drop` a group without any scored
    sample is dropped, unless as many as fill a batch came in a row.
    """

    def __init__(self, trainer: Collects) -> None:
        super().__init__(trainer)
        cfg = trainer.cfg.trainer
        self.settings, self.algorithm, self.groups_per_step = cfg.fully_async, cfg.algorithm, cfg.train_batch_size
        self.tickets = Tickets(trainer.train_loader, num_batches=cfg.epochs * len(trainer.train_loader))
        self._running: dict[asyncio.Task[list[Trajectory]], Ticket] = {}
        self._ready: list[Group] = []
        self._failure: BaseException | None = None
        self._ends = False
        self._changed = asyncio.Event()
        self._step = self._num_trained = self._num_dropped = self._num_too_old = self._num_unscored_in_a_row = 0
        self._metrics: dict[str, float] = {}

    def begin(self, step: int) -> None:
        self._step, self._num_trained = step, (step - 1) * self.groups_per_step
        self._begin_more()

    def published(self, step: int) -> None:
        self._step = step + 1
        self._begin_more()

    async def take(self, step: int) -> list[Trajectory]:
        """As many groups as a step trains on, the oldest weights first; none over the bound."""
        ready_at_first = len(self._ready)
        while (groups := self._picked(step)) is None:
            if not self._running:
                raise PromptsUsedUp
            self._changed.clear()
            waits_for = f"groups {len(self._ready)}/{self.groups_per_step}, {len(self._running)} on their way"
            self.trainer.progress.waiting_for(f"{waits_for}, for step {step}")
            await self.patience.wait(self._changed.wait(), name=f"the groups of step {step} ({waits_for})")
        self._metrics = self._measured(groups, step, ready_at_first)
        self._num_dropped = self._num_too_old = 0
        return [t for group in _with_names_of_their_own(groups) for t in group]

    def moved(self, done: int, total: int) -> None:
        self.patience.moved()

    async def before_publish(self) -> None:
        """Waits for nothing. Raises what a rollout raised: no weights are published for a run that is over."""
        self._raise_failure()

    @property
    def used_up(self) -> bool:
        return not self._running and not self._ready and self.tickets.all_used

    def trained_through(self) -> Mapping[str, int]:
        open_prompts = self.tickets.state()
        if not open_prompts:
            return super().trained_through()
        epoch, position = divmod(min(step for _, step, _, _ in open_prompts) - 1, len(self.trainer.train_loader))
        return {"epoch": epoch, "position": position}

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def state(self) -> dict[str, Any]:
        return {"open_prompts": self.tickets.state()}

    def load(self, state: dict[str, Any], folder: Path) -> None:
        self.tickets.load(state.get("open_prompts", []))

    async def close(self) -> None:
        self._ends = True  # a group that ends now begins no other
        await end(self._running, name="the groups on their way")

    # Making groups

    def _begin_more(self) -> None:
        """As many as may be on their way, while there are prompts."""
        room = staleness.capacity(
            last_step=min(self._step + self.settings.max_staleness_steps, self.trainer.total_steps),
            groups_per_step=self.groups_per_step,
            accepted=self._num_trained + len(self._ready),
            running=len(self._running),
            workers=self.settings.num_parallel_generation_workers,
        )
        for _ in range(room if self._failure is None else 0):
            ticket = self.tickets.next()
            if ticket is None:
                return
            work = self.trainer.collect([ticket.named_task], ticket.step)
            task = asyncio.create_task(work, name=f"rollouts of prompt {ticket.task.uid}")
            self._running[task] = ticket
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[list[Trajectory]]) -> None:
        ticket = self._running.pop(task)
        if self._ends or task.cancelled():
            return
        try:
            self._settle(ticket, task)
            self._begin_more()
        except Exception as error:  # raised here it would reach the event loop's log, and nobody who waits
            self._failure = self._failure or error
        self.patience.moved()
        self._changed.set()

    def _settle(self, ticket: Ticket, task: asyncio.Task[list[Trajectory]]) -> None:
        """Keeps or drops what the task made; raises what it raised."""
        try:
            trajectories = task.result()
        except NothingLeft:
            self._num_unscored_in_a_row += 1
            if self._num_unscored_in_a_row >= self.groups_per_step:
                raise
            self._num_dropped += 1
            self.tickets.used(ticket)
        else:
            self._num_unscored_in_a_row = 0
            self._accept(ticket, trajectories)

    def _accept(self, ticket: Ticket, trajectories: list[Trajectory]) -> None:
        require_versions(trajectories)  # staleness follows from them
        if self.settings.sample_full_batch and not is_useful(
            trajectories, tolerance=self.algorithm.zero_variance_filter_tol
        ):
            self._num_dropped += 1
            self.tickets.used(ticket)
        else:
            self._ready.append(Group(ticket, trajectories, staleness.oldest_version(trajectories)))

    # Taking groups

    def _picked(self, step: int) -> list[Group] | None:
        """The groups of a step, once there are enough within the bound, in the order of their prompts. Raises what a
        rollout raised."""
        self._raise_failure()
        for group in [g for g in self._ready if self._staleness(g, step) > self.settings.max_staleness_steps]:
            self._ready.remove(group)
            self.tickets.again(group.ticket)
            self._num_too_old += 1
        self._begin_more()
        if len(self._ready) < self.groups_per_step:
            return None
        oldest_first = sorted(self._ready, key=lambda g: (g.oldest_version, g.ticket.order))
        chosen = oldest_first[: self.groups_per_step]
        self._ready = [group for group in self._ready if group not in chosen]
        for group in chosen:
            self.tickets.used(group.ticket)
        self._num_trained += len(chosen)
        return sorted(chosen, key=lambda g: g.ticket.order)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _staleness(self, group: Group, step: int) -> int:
        return staleness.staleness(group.trajectories, self.trainer.rollouts.version_of_step, step=step)

    def _measured(self, groups: Sequence[Group], step: int, ready_at_first: int) -> dict[str, float]:
        ages = [self._staleness(group, step) for group in groups]
        return {
            "async/staleness_mean": sum(ages) / len(ages),
            "async/staleness_max": float(max(ages)),
            "async/staleness_min": float(min(ages)),
            "async/staleness_ratio": sum(age > 0 for age in ages) / len(ages),
            "async/staleness_violation_count": float(self._num_too_old),
            "async/gen_buffer_qsize_at_wait_start": float(ready_at_first),
            "async/num_groups_dropped": float(self._num_dropped),
            "async/keep_rate": len(groups) / (len(groups) + self._num_dropped),
            "trainer/epoch": float((groups[-1].ticket.step - 1) // len(self.trainer.train_loader)),
        }


def _with_names_of_their_own(groups: Sequence[Group]) -> list[list[Trajectory]]:
    """The groups' trajectories, a prompt of two epochs under two uids, so that no statistic mixes them."""
    seen: set[str] = set()
    out = []
    for group in groups:
        uid = group.trajectories[0].id.uid
        name = uid if uid not in seen else f"{uid}@{group.ticket.step}"
        seen.add(name)
        out.append([replace(t, id=TrajectoryID(name, t.id.repetition)) for t in group.trajectories])
    return out
