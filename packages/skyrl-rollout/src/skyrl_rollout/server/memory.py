"""What the engine gives back when asked: cached KV blocks, or all its memory while it sleeps."""

from __future__ import annotations

import logging

from skyrl_rollout.errors import MissingCapability, WrongState
from skyrl_rollout.server.adapters import AdapterShelf
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.pausing import Pauser
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.state import FINAL, EngineState, ServerState

logger = logging.getLogger(__name__)
PARTS = frozenset({"weights", "kv_cache"})


class EngineMemory:
    """Every call holds the pauser's lock, so that no pause and no commit happens meanwhile."""

    def __init__(
        self, engine: Engine, state: ServerState, runs: RunRegistry, pauser: Pauser, adapters: AdapterShelf
    ) -> None:
        self._engine, self._state, self._runs, self._pauser, self._adapters = engine, state, runs, pauser, adapters

    async def reset_cache(self, *, preempt_running: bool) -> int:
        """Drops cached KV and returns how many blocks that freed. Raises WrongState where running requests hold blocks
        and may not lose them."""
        if not self._engine.capabilities.reset_cache:
            raise MissingCapability.named("reset_cache", "ResetCache")
        async with self._pauser.lock:
            self._refuse_unless_awake("ResetCache")
            if (running := self._runs.running) and not preempt_running:
                raise WrongState(
                    f"{running} running requests hold KV blocks: let them end, or set preempt_running so that "
                    f"theirs is computed again"
                )
            return await self._engine.reset_cache(preempt_running=preempt_running)

    async def sleep(self, level: str) -> int:
        """Gives the engine's memory back and returns the bytes freed. Ends a pause that is held.

        Raises WrongState while requests run or wait, and where the server sleeps already.
        """
        if level not in self._engine.capabilities.sleep_levels:
            raise MissingCapability.named("sleep", f"sleeping with {level.upper()}")
        async with self._pauser.lock:
            self._refuse_unless_awake("Sleep")
            running, waiting = self._runs.running + self._runs.slots_taken, self._runs.waiting
            if running or waiting:
                raise WrongState(f"{running} requests run and {waiting} wait: let them end or abort them first")
            if not (was_held := self._pauser.is_held):
                await self._pauser.stop("keep", clear_cache=True, rejects_new_work=True)
            try:
                if level == "discard":
                    await self._adapters.drop_all()
                freed = await self._engine.sleep(level)
            except BaseException:
                if not was_held:
                    await self._pauser.start()
                raise
            self._pauser.forget()
            self._state.asleep, self._state.weights_lost = PARTS, self._state.weights_lost or level == "discard"
            self._state.move(EngineState.ASLEEP)
            logger.info("asleep (%s): %d bytes freed", level, freed)
            return freed

    async def wake_up(self, *, weights: bool, kv_cache: bool) -> EngineState:
        """Takes back what is asked for (neither: both) and returns the state: ASLEEP while a part is missing,
        AWAITING_WEIGHTS where they were discarded, else SERVING. A server that is awake stays as it is."""
        if not self._engine.capabilities.sleep_levels:
            raise MissingCapability.named("sleep", "WakeUp")
        wanted = {name for name, asked in (("weights", weights), ("kv_cache", kv_cache)) if asked} or PARTS
        async with self._pauser.lock:
            if self._state.state in FINAL:
                self._state.refuse_new_work()
            missing = self._state.asleep & wanted
            if missing:
                await self._engine.wake_up(weights="weights" in missing, kv_cache="kv_cache" in missing)
                self._state.asleep -= missing
                await self._pauser.start()
            return self._state.state

    def _refuse_unless_awake(self, what: str) -> None:
        if self._state.state in FINAL:
            self._state.refuse_new_work()
        if self._state.resting is not None:
            raise WrongState(f"{what} needs a server that is awake, this one is {self._state.resting.name}")
