"""How tasks learn that something changed, without polling."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes everyone who waits at the moment it fires; a later waiter waits for the next time."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def fire(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """False when `timeout_s` ran out first."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait((self._next,), timeout=timeout_s)
        return bool(done)
