"""What happens by itself when a trainer falls silent: a timer on the server's monotonic clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skyrl_rollout.errors import InvalidRequest

MAX_LEASE_S = 24 * 3600.0


def checked_lease(seconds: float) -> float:
    """`seconds`, which a caller chose. Raises InvalidRequest for a lease that would outlive any trainer's silence."""
    if seconds > MAX_LEASE_S:
        raise InvalidRequest(f"lease is {seconds:.0f} s, at most {MAX_LEASE_S:.0f} s are given: renew it instead")
    return seconds


class Lease:
    """Calls `expired` once, `seconds` after the last `renew`, unless released."""

    def __init__(self, expired: Callable[[], None]) -> None:
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None

    def renew(self, seconds: float) -> None:
        self.release()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._run_out)

    def release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run_out(self) -> None:
        self._timer = None
        self._expired()
