"""Stopping the engine between two tokens and starting it again: one pause is held at a time, each with a lease."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass

from skyrl_rollout.errors import MissingCapability, UnknownPause, WrongState
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.leases import Lease
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.state import FINAL, UNAVAILABLE, EngineState, ServerState

logger = logging.getLogger(__name__)
DEFAULT_LEASE_S = 60.0


@dataclass(frozen=True)
class PauseReport:
    """aborted, frozen: requests that were ended or frozen by the pause."""

    pause_id: str
    aborted: int
    frozen: int
    weight_version: int


class Pauser:
    """`lock` is held by whoever pauses, resumes or commits; `waits` is true while that one only waits for running
    requests to end, so that it may still be called off. `stopped_at`: when the last stop began (monotonic seconds)."""

    def __init__(self, engine: Engine, state: ServerState, runs: RunRegistry) -> None:
        self.lock = asyncio.Lock()
        self.waits = False
        self.stopped_at = 0.0
        self._engine, self._state, self._runs = engine, state, runs
        self.rejects_new_work = False
        self._held: str | None = None
        self._last_released = ""
        self._lease = Lease(self._lease_ran_out)
        self._releasing: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        return self._held is not None

    async def pause(self, mode: str, *, rejects_new_work: bool, lease_s: float) -> PauseReport:
        """Raises WrongState while another pause is held; cancelled while it waits, the server serves on."""
        async with self.lock:
            if self._held is not None:
                raise WrongState(
                    f"the server is already paused as {self._held}: Resume that pause first, or wait for its lease",
                    details={"pause_id": self._held},
                )
            aborted = await self.stop(mode, clear_cache=False, rejects_new_work=rejects_new_work)
            self.hold(str(uuid.uuid4()), lease_s, rejects_new_work=rejects_new_work)
            frozen = 0 if mode == "abort" else self._runs.frozen
            return PauseReport(self._held or "", aborted, frozen, self._state.weight_version)

    async def resume(self, pause_id: str) -> int:
        """Ends the pause and returns the version that serves. Raises UnknownPause for any other id."""
        async with self.lock:
            if pause_id and pause_id == self._last_released:
                return self._state.weight_version
            if pause_id != self._held:
                held = f"the pause held is {self._held}" if self._held else "no pause is held"
                raise UnknownPause(f"there is no pause {pause_id!r}: {held}")
            await self._release()
            return self._state.weight_version

    async def stop(self, mode: str, *, clear_cache: bool, rejects_new_work: bool = False) -> int:
        """Call with the lock: stops the engine and returns how many requests that ended. Undone when it fails."""
        if mode not in self._engine.capabilities.pause_modes:
            raise MissingCapability.named("pause_modes", f"pausing with {mode}")
        if self._state.state in (*FINAL, *UNAVAILABLE):
            self._state.refuse_new_work()
        self._state.move(EngineState.PAUSING, rejects_new_work=rejects_new_work)
        try:
            if mode == "wait":
                self.waits = True
                await self._runs.all_started_finished()
                self.waits = False
            running = self._runs.running
            self.stopped_at = time.monotonic()
            await self._engine.pause(mode, clear_cache=clear_cache)
        except BaseException:
            self.waits = False
            await self.start()
            raise
        self._state.move(EngineState.PAUSED, rejects_new_work=rejects_new_work)
        return running if mode == "abort" else 0

    async def start(self) -> None:
        """Call with the lock: the engine makes tokens again, unless it has no memory or no weights for that."""
        if (resting := self._state.resting) is not None:
            self._state.move(resting)
            return
        await self._engine.resume()
        self._state.move(EngineState.SERVING)

    def forget(self) -> None:
        """Call with the lock: the pause that is held, if any, ends without a start."""
        self._lease.release()
        self._last_released, self._held = "", None

    def hold(self, pause_id: str, lease_s: float, *, rejects_new_work: bool = False) -> None:
        """Call with the lock, engine stopped: it stays so until Resume(pause_id) or the end of the lease."""
        self._held, self.rejects_new_work = pause_id, rejects_new_work
        self._state.move(EngineState.PAUSED, rejects_new_work=rejects_new_work)
        self._lease.renew(lease_s)

    async def release(self) -> None:
        """Ends whatever pause is held, because its owner is gone."""
        async with self.lock:
            if self._held is not None:
                await self._release()

    async def _release(self) -> None:
        self._lease.release()
        self._last_released, self._held = self._held or "", None
        await self.start()

    def _lease_ran_out(self) -> None:
        logger.warning("pause %s: its lease ran out, serving again", self._held)
        self._releasing = asyncio.create_task(self.release())
