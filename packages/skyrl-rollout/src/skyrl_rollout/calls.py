"""How one unary call is made: a deadline, retries while the code allows them, an error that names the wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from skyrl_rollout.errors import Cancelled, DeadlineExceeded, RolloutError, ServerUnreachable, from_rpc_error
from skyrl_rollout.security import ANONYMOUS, Credentials


class Deadline:
    """The end of a piece of work that takes several calls; each call gets what is left."""

    def __init__(self, timeout_s: float, purpose: str) -> None:
        self.timeout_s = timeout_s
        self.purpose = purpose
        self._ends_at = time.monotonic() + timeout_s

    def left_s(self, what: str) -> float:
        """Raises DeadlineExceeded, naming what it was about to wait for, when nothing is left."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{self.purpose} did not end within {self.timeout_s:g} s: it had come to {what}")
        return left


@dataclass
class Backoff:
    """Waits that double from `first_s` to `most_s`, each shortened at random by up to a half, so that the callers of a
    server that comes back do not arrive together."""

    first_s: float = 0.05
    most_s: float = 2.0
    attempts: int = 0

    def next_s(self, retry_after_s: float | None = None) -> float:
        """The next wait; the server's own wish (RetryInfo) is a lower bound."""
        wait = min(self.most_s, self.first_s * 2 ** min(self.attempts, 16)) * random.uniform(0.5, 1.0)
        self.attempts += 1
        return max(wait, retry_after_s or 0.0)

    def reset(self) -> None:
        self.attempts = 0


class Caller:
    """Unary calls to one server: `await caller(stub.Pause, request, what="Pause", timeout_s=10)`.

    away_s: how long it may be unreachable before a call fails (None: until its deadline).
    """

    def __init__(self, url: str, credentials: Credentials = ANONYMOUS, *, away_s: float | None = None) -> None:
        self.url = url
        self.away_s = away_s
        self._credentials = credentials

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with a call that begins now; a token that was replaced in its file is the new one."""
        return self._credentials.metadata()

    async def __call__(self, method: Callable[..., Any], request: object, *, what: str, timeout_s: float) -> Any:
        """Every request of the protocol is safe to send again (op ids, update ids), so a broken connection is retried
        until the deadline. Raises the typed error of the server, DeadlineExceeded or ServerUnreachable."""
        loop = asyncio.get_running_loop()
        deadline, backoff = loop.time() + timeout_s, Backoff()
        last: RolloutError | None = None
        away_since: float | None = None
        while (left := deadline - loop.time()) > 0:
            try:
                return await method(request, timeout=left, metadata=self.metadata)
            except grpc.aio.AioRpcError as raised:
                error = from_rpc_error(raised, endpoint=self.url)
            except grpc.aio.UsageError:
                raise closed_here(self.url, what) from None
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                break
            if not error.retried:
                raise error
            last, wait = error, backoff.next_s(error.retry_after_s)
            if loop.time() + wait >= deadline:
                break
            away_since = (away_since or loop.time()) if isinstance(error, ServerUnreachable) else None
            if self.away_s is not None and away_since is not None and loop.time() - away_since > self.away_s:
                raise unreachable(self.url, what, self.away_s, last)
            await asyncio.sleep(wait)
        raise self._no_answer(what, timeout_s, last)

    def _no_answer(self, what: str, timeout_s: float, last: RolloutError | None) -> RolloutError:
        if last is None:
            return DeadlineExceeded(f"no answer to {what} within {timeout_s:g} s from {self.url}")
        if isinstance(last, ServerUnreachable):
            return unreachable(self.url, what, timeout_s, last)
        return type(last)(
            f"{self.url} refused {what} for {timeout_s:g} s: {last.message}",
            code=last.code,
            reason=last.reason,
            details=last.details,
            retry_after_s=last.retry_after_s,
        )


def closed_here(url: str, what: str) -> Cancelled:
    """The error for a call on a client that was closed meanwhile."""
    return Cancelled(f"the client of {url} was closed before {what} had its answer")


def unreachable(url: str, what: str, waited_s: float, last: RolloutError | None) -> ServerUnreachable:
    """The error for a server that did not answer at all."""
    cause = f" ({last.message.removeprefix(url + ': ')})" if last is not None else ""
    return ServerUnreachable(
        f"no rollout server answers at {url}: tried {what} for {waited_s:.3g} s{cause}; "
        "start one there or correct the url"
    )
