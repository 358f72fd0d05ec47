"""Whether the rollout servers are still there, so that work on a dead one ends in an error that names it, not in a
wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import DeadlineExceeded, RolloutError, ServerUnreachable
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.tokens import Generation

from skyrl.train.failures import RunFailed

log = logging.getLogger(__name__)
R = TypeVar("R")

PROCESS_POLL_S = 0.25
EXTERNAL_POLL_S = 5.0
# How long a server that somebody else runs may be away: a restart of its network, not of its process.
EXTERNAL_AWAY_S = 60.0
# A broken connection is seen before the exit of the process behind it.
NOTICE_S = 2.0
LAST_LINES = 20


class ServerDied(RunFailed):
    """A rollout server of this run is gone. The message names it and shows what it said last."""


class WatchedProcess(Protocol):
    """What is needed of a `launch.server.ServerProcess`."""

    url: str

    @property
    def pid(self) -> int: ...
    @property
    def ended_by(self) -> str: ...
    def alive(self) -> bool: ...
    def last_lines(self, n: int) -> Sequence[str]: ...


class ServerWatch:
    """Looks after the processes that this run started, or asks the servers that it did not start whether they are
    still the same ones."""

    def __init__(self, processes: Sequence[WatchedProcess], external: Sequence[RolloutClient]) -> None:
        self._processes = tuple(processes)
        self._external = tuple(external)
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._watch_processes())] if processes else []
        self._tasks += [asyncio.create_task(self._watch_external(client)) for client in external]

    def raise_if_gone(self) -> None:
        """Raises ServerDied once any server is gone."""
        self._look_at_processes()
        if self._gone.done() and not self._gone.cancelled():
            raise ServerDied(self._gone.result())

    async def guard(self, work: Coroutine[Any, Any, R]) -> R:
        """`work`, ended by ServerDied as soon as a server is gone."""
        task = asyncio.create_task(work)
        first: set[asyncio.Future[Any]] = {task, self._gone}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.raise_if_gone()
            elif isinstance(task.exception(), ServerUnreachable):
                await asyncio.wait({self._gone}, timeout=NOTICE_S)
                self.raise_if_gone()
            return await task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RolloutError):
                    await task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._gone.cancel()

    async def _watch_processes(self) -> None:
        while not self._gone.done():
            self._look_at_processes()
            await asyncio.sleep(PROCESS_POLL_S)

    def _look_at_processes(self) -> None:
        for process in self._processes:
            if not self._gone.done() and not process.alive():
                said = "\n".join(f"  | {line}" for line in process.last_lines(LAST_LINES)) or "  (it said nothing)"
                name = f"the rollout server at {process.url} (process {process.pid})"
                self._gone.set_result(f"{name} died during the run ({process.ended_by}); it said last:\n{said}")

    async def _watch_external(self, client: RolloutClient) -> None:
        instance, clock = client.info.instance_id, asyncio.get_running_loop().time
        heard = clock()
        while not self._gone.done():
            await asyncio.sleep(EXTERNAL_POLL_S)
            try:
                info = await client.refresh(timeout_s=EXTERNAL_POLL_S)
            except (ServerUnreachable, DeadlineExceeded) as error:
                if clock() - heard > EXTERNAL_AWAY_S:
                    self._say(f"the rollout server at {client.url} has been away for {EXTERNAL_AWAY_S:g} s: {error}")
                continue
            except RolloutError as error:
                log.warning("asking the rollout server at %s: %s", client.url, error)
                continue
            heard = clock()
            if info.instance_id != instance:
                self._say(
                    f"the rollout server at {client.url} was replaced by another process during the run (instance "
                    f"{instance} became {info.instance_id}), which has none of this run's weights: "
                    "run again with trainer.resume_mode=latest"
                )

    def _say(self, what: str) -> None:
        if not self._gone.done():
            self._gone.set_result(what)


class WatchedPool(RolloutPool):
    """A pool whose generations end at once when a server is gone."""

    def __init__(self, clients: Sequence[RolloutClient], watch: ServerWatch) -> None:
        super().__init__(clients)
        self._watch = watch

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        """`RolloutPool.generate`; raises ServerDied too."""
        return await self._watch.guard(super().generate(*args, **kwargs))
