"""How many samples are asked for at once, and what one failure does to the rest: it ends them and is raised itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from skyrl.train.failures import RunFailed

R = TypeVar("R")


class Slots:
    """At most `limit` samples in flight; a request for more than that runs alone."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self.in_flight = 0
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, count: int, *, name: str, timeout_s: float) -> AsyncIterator[None]:
        """Slots for `count` samples. RunFailed, beginning with `name`, where nobody gives any back for `timeout_s`."""
        async with self._freed:
            while self.in_flight and self.in_flight + count > self.limit:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._freed.wait()
                except TimeoutError as error:
                    raise RunFailed(
                        f"{name}: {self.in_flight} samples are in flight, and none of them ended within {timeout_s:g} s"
                    ) from error
            self.in_flight += count
        try:
            yield
        finally:
            # No lock: the event loop runs this line alone, also while the task is being cancelled.
            self.in_flight -= count
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self._freed:
            self._freed.notify_all()


async def all_of(work: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """The results in order. The first error cancels what still runs, waits for it to end, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [t.result() for t in tasks]
