"""Updates that never pass through the server's memory: the engine joins a group, and receives at the commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from skyrl_rollout.errors import WrongState
from skyrl_rollout.server.engine import CollectiveTransfer, Engine
from skyrl_rollout.weights.manifest import TensorLayout, TensorSpec

logger = logging.getLogger(__name__)


class Collective:
    """One group that the engine joins. It stands in for a `Staging` that holds no byte: `pull` joins, `receive` fills
    the live weights, `close` leaves. after: the end of the group before, which the engine leaves first."""

    releases_source = False

    def __init__(
        self,
        engine: Engine,
        transfer: CollectiveTransfer,
        tensors: Sequence[TensorLayout],
        after: asyncio.Task[None] | None,
    ) -> None:
        self._engine, self._transfer, self._tensors, self._after = engine, transfer, tensors, after
        self._joining: asyncio.Task[None] | None = None
        self.leaving: asyncio.Task[None] | None = after

    @property
    def durable(self) -> dict[int, int]:
        return {}

    @property
    def is_joined(self) -> bool:
        joining = self._joining
        return joining is not None and joining.done() and not joining.cancelled() and joining.exception() is None

    async def pull(self) -> AsyncGenerator[None]:
        """Returns when the trainer may enter. Whatever the engine raises ends the update: it cannot join twice."""
        if self._joining is None:
            self._joining = asyncio.create_task(self._join(), name="join a weight group")
        await asyncio.wait((self._joining,))
        if self._joining.cancelled():
            raise WrongState("the update was aborted while the engine joined its group")
        self._joining.result()
        return
        yield

    async def receive(self, within_s: float) -> None:
        """The engine is paused. Raises TimeoutError when the bytes are not there in time: the weights are undefined."""
        await asyncio.wait_for(self._engine.receive(), within_s)

    def need_joined(self) -> None:
        """Raises WrongState before the engine has joined."""
        if not self.is_joined:
            raise WrongState("the engine has not joined the group: call PullUpdate and wait for PHASE_READY")

    def view(self, spec: TensorSpec) -> memoryview:
        raise AssertionError("a collective update has no bytes to look at")

    def discard(self, shard: int) -> None:
        """There is nothing to discard."""

    def close(self) -> None:
        """Leaves the group in the background; the next one waits for that."""
        if self._joining is not None:
            self.leaving = asyncio.create_task(self._leave(self._joining), name="leave a weight group")

    async def _join(self) -> None:
        if self._after is not None:
            await asyncio.wait((self._after,))
        await self._engine.join(self._transfer, self._tensors)

    async def _leave(self, joining: asyncio.Task[None]) -> None:
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        try:
            await self._engine.leave()
        except Exception:
            logger.exception("the engine failed while it left a weight group")
