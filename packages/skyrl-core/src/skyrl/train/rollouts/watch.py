"""Whether rollout servers are left to work with; where none is, what waits for one ends in an error that names it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from skyrl_rollout.errors import RolloutError, ServerUnreachable
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.tokens import Generation

from skyrl.train.failures import RunFailed

log = logging.getLogger(__name__)
R = TypeVar("R")

PROCESS_POLL_S = 0.25
EXTERNAL_POLL_S = 1.0
# How long all servers that somebody else runs may be away: a restart takes its time.
EXTERNAL_AWAY_S = 60.0
# A broken connection is seen before the exit of the process behind it.
NOTICE_S = 2.0
LAST_LINES = 20


class ServerDied(RunFailed):
    """No rollout server of this run is left. The message names the last and shows what it said."""


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
    """Looks after the processes that this run started, or after the servers of `pool` that it did not start. The run
    goes on while one is left."""

    def __init__(self, processes: Sequence[WatchedProcess], pool: RolloutPool) -> None:
        self._processes, self._pool = tuple(processes), pool
        self._dead: set[str] = set()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watch = self._watch_processes() if processes else self._watch_external()
        self._task = asyncio.create_task(watch)

    def raise_if_gone(self) -> None:
        """Raises ServerDied once no server is left."""
        self._look_at_processes()
        if self._gone.done() and not self._gone.cancelled():
            raise ServerDied(self._gone.result())

    async def guard(self, work: Coroutine[Any, Any, R]) -> R:
        """`work`, ended by ServerDied as soon as no server is left."""
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
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._gone.cancel()

    async def _watch_processes(self) -> None:
        while not self._gone.done():
            self._look_at_processes()
            await asyncio.sleep(PROCESS_POLL_S)

    def _look_at_processes(self) -> None:
        for process in self._processes:
            if process.url in self._dead or process.alive():
                continue
            self._dead.add(process.url)
            said = "\n".join(f"  | {line}" for line in process.last_lines(LAST_LINES)) or "  (it said nothing)"
            name = f"the rollout server at {process.url} (process {process.pid})"
            what = f"{name} died during the run ({process.ended_by}); it said last:\n{said}"
            if len(self._dead) == len(self._processes):
                self._say(what)
            else:
                log.error("%s\nthe run goes on with the others", what)

    async def _watch_external(self) -> None:
        while not self._gone.done():
            await asyncio.sleep(EXTERNAL_POLL_S)
            replicas = self._pool.replicas
            if all(r.away_s > EXTERNAL_AWAY_S for r in replicas):
                told = "; ".join(f"{r.url} has been away for {r.away_s:.0f} s ({r.why_away})" for r in replicas)
                self._say(f"no rollout server is left: the one at {told}")

    def _say(self, what: str) -> None:
        if not self._gone.done():
            self._gone.set_result(what)


class WatchedPool(RolloutPool):
    """A pool whose generations end at once when no server is left. policy_id: what is sampled from, "" being the base
    weights. num_moves, num_kept_tokens, num_restarts: over all generations so far."""

    watch: ServerWatch
    policy_id: str = ""
    num_moves = num_kept_tokens = num_restarts = 0

    def highest_version(self, policy_id: str | None = None) -> int:
        """The highest committed version of a policy, unset: of the one that is sampled from."""
        return super().highest_version(self.policy_id if policy_id is None else policy_id)

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        """`RolloutPool.generate`, of `policy_id` where none is named; raises ServerDied too."""
        generation = await self.watch.guard(super().generate(*args, **{"policy_id": self.policy_id} | kwargs))
        self.num_moves += generation.num_moves
        self.num_kept_tokens += generation.num_kept_tokens
        self.num_restarts += generation.num_restarts
        return generation
