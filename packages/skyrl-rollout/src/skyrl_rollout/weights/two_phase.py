"""One update on several servers in step: nobody commits before all that are left have sealed; who fails is left out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from skyrl_rollout.errors import (
    Fenced,
    InvalidRequest,
    MissingCapability,
    ModelMismatch,
    ProtocolMismatch,
    RolloutError,
    VersionConflict,
)
from skyrl_rollout.weights.update import ServerUpdate

log = logging.getLogger(__name__)

# What is wrong with the trainer or its request, not with one replica: it would be wrong at the others too.
_ENDS_ALL = (Fenced, InvalidRequest, MissingCapability, ModelMismatch, ProtocolMismatch, VersionConflict)
_Step = Callable[[ServerUpdate], Awaitable[None]]


class Round:
    """`updates` that go through begin, transfer, seal and commit together.

    on_failure "drop": a replica that fails before the commit is left out (`failed` says why) while any other is left;
    "abort": the first failure ends the round. An error of `_ENDS_ALL` always does. No replica has advanced then.
    """

    def __init__(self, updates: Sequence[ServerUpdate], *, on_failure: str) -> None:
        self.updates = list(updates)
        self.failed: dict[str, RolloutError] = {}
        self.seconds: dict[str, float] = {}
        self._on_failure = on_failure

    @property
    def live(self) -> list[ServerUpdate]:
        """Those that have not failed."""
        return [u for u in self.updates if u.target.url not in self.failed]

    @property
    def committed(self) -> list[ServerUpdate]:
        return [u for u in self.updates if u.progress.committed]

    async def step(self, phase: str, do: _Step) -> None:
        """One step on every live update that still needs it. Raises what ends the round; no replica has advanced."""
        with self.timed(phase):
            todo = [u for u in self.live if not u.progress.committed]
            for update, error in zip(todo, await self._each(todo, do), strict=True):
                if error is not None:
                    log.warning("%s is left out of the update: %s", update.target.url, error)
                    self.failed[update.target.url] = error
            if not self.live:
                raise next(iter(self.failed.values()))

    async def commit(self, policy_id: str) -> None:
        """All that sealed; one that fails now is STALE. Raises its error where none committed."""
        with self.timed("commit"):
            todo = [u for u in self.live if not u.progress.committed]
            results = await asyncio.gather(*(u.commit(policy_id) for u in todo), return_exceptions=True)
            for update, error in zip(todo, results, strict=True):
                if isinstance(error, RolloutError):
                    log.warning("%s did not commit and is STALE: %s", update.target.url, error)
                    self.failed[update.target.url] = error
                elif error is not None:
                    raise error
            if not self.committed:
                raise next(iter(self.failed.values()))

    async def _each(self, updates: Sequence[ServerUpdate], do: _Step) -> list[RolloutError | None]:
        """The error of each. The first that ends the round stops the others and is raised."""
        tasks = [asyncio.ensure_future(do(u)) for u in updates]
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (error := task.exception()) is not None and self._ends_all(error):
                        raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors = [task.exception() for task in tasks]
        return [error if isinstance(error, RolloutError) else None for error in errors]

    def _ends_all(self, error: BaseException) -> bool:
        return self._on_failure == "abort" or not isinstance(error, RolloutError) or isinstance(error, _ENDS_ALL)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Notes the seconds of a phase."""
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started

    async def end(self) -> None:
        """Aborts what was begun and did not end, within 5 s, and closes the connections."""
        await asyncio.gather(*(u.abort() for u in self.updates))
        await asyncio.gather(*(u.close() for u in self.updates))
