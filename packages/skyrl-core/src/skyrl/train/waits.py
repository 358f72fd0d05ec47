"""How long the run waits for something of which it hears from time to time, and what it says when nothing comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from skyrl.train.failures import RunFailed

log = logging.getLogger(__name__)
R = TypeVar("R")

END_S = 30.0


class Patience:
    """Named waits, one at a time, each of which ends once nothing has moved for `timeout_s`; `key` is the deadline's
    key in the configuration."""

    def __init__(self, timeout_s: float, *, key: str) -> None:
        self.timeout_s, self.key = timeout_s, key
        self._deadline: asyncio.Timeout | None = None

    def moved(self) -> None:
        """Something arrived: the time begins anew."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

    async def wait(self, work: Awaitable[R], *, name: str) -> R:
        """What `work` gives. RunFailed, which begins with `name`, where nothing moves in time; `work` is cancelled."""
        deadline: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                self._deadline = deadline
                return await work
        except TimeoutError as error:
            if deadline is None or not deadline.expired():
                raise
            raise RunFailed(f"{name}: nothing arrived within {self.timeout_s:g} s ({self.key})") from error
        finally:
            self._deadline = None


async def end(tasks: Iterable[asyncio.Task[R]], *, name: str, timeout_s: float = END_S) -> None:
    """Cancels tasks and waits for their end; one that does not end in time is left to the end of the process."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    if not cancelled:
        return
    done, pending = await asyncio.wait(cancelled, timeout=timeout_s)
    for task in done:
        if not task.cancelled():
            task.exception()  # it is asked for, so that asyncio does not report it as forgotten
    if pending:
        log.warning("%d of %s did not end within %g s of being cancelled", len(pending), name, timeout_s)
