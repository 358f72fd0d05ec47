"""Which prompt is sampled next where groups are made one by one, so that none is lost and none is used twice.

Prompts come in the order of the loader, batch by batch, so that a fully asynchronous run goes through the same prompts
as a plain one. A prompt is open from the moment its batch is read until it is used; a checkpoint keeps the open ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from skyrl.train.generator.trajectory import PromptTask


@dataclass(frozen=True)
class Ticket:
    """One prompt of one epoch. step: the one that a plain run would train it in, from which its seeds follow; attempt:
    from 1, how often it is sampled."""

    step: int
    place: int
    task: PromptTask
    attempt: int = 1

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the run."""
        return self.step, self.place

    @property
    def named_task(self) -> PromptTask:
        """The prompt under a uid of this attempt: `17#2` is sampled with other seeds than `17`."""
        return self.task if self.attempt == 1 else replace(self.task, uid=f"{self.task.uid}#{self.attempt}")


class Tickets:
    """Hands out the prompts of `num_batches` batches of the loader, each until it is `used`."""

    def __init__(self, loader: Any, *, num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches
        self._waiting: deque[Ticket] = deque()
        self._out: dict[tuple[int, int], Ticket] = {}

    def next(self) -> Ticket | None:
        """The next prompt to sample; None where all are handed out."""
        if not self._waiting:
            self._read()
        if not self._waiting:
            return None
        ticket = self._waiting.popleft()
        self._out[ticket.order] = ticket
        return ticket

    def used(self, ticket: Ticket) -> None:
        """It is trained on, or dropped for good."""
        del self._out[ticket.order]

    def again(self, ticket: Ticket) -> None:
        """Its samples are thrown away: it is the next to be sampled, anew."""
        del self._out[ticket.order]
        self._waiting.appendleft(replace(ticket, attempt=ticket.attempt + 1))

    @property
    def all_used(self) -> bool:
        """Whether there is nothing left to sample and nothing open."""
        return not self._waiting and not self._out and self.num_batches_read >= self._num_batches

    @property
    def num_batches_read(self) -> int:
        """Of all epochs."""
        return self._loader.epoch * len(self._loader) + self._loader.position

    def _read(self) -> None:
        if self.num_batches_read >= self._num_batches:
            return
        tasks = self._loader.next_batch()
        self._waiting.extend(Ticket(self.num_batches_read, place, task) for place, task in enumerate(tasks))

    # State

    def state(self) -> list[list[Any]]:
        """The open prompts in order, as JSON: [uid, step, place, attempt]."""
        tickets = sorted([*self._out.values(), *self._waiting], key=lambda t: t.order)
        return [[t.task.uid, t.step, t.place, t.attempt] for t in tickets]

    def load(self, state: list[list[Any]]) -> None:
        """The open prompts of a checkpoint are sampled first. ValueError for a uid that the data does not have."""
        tasks = {task.uid: task for task in self._loader.dataset}
        missing = [uid for uid, *_ in state if uid not in tasks]
        if missing:
            raise ValueError(f"prompt {missing[0]} of the checkpoint is not in {self._loader.dataset.key}")
        self._waiting = deque(Ticket(step, place, tasks[uid], attempt) for uid, step, place, attempt in state)
        self._out = {}
