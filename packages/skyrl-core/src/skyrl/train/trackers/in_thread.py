"""A tracker in a thread of its own: the training loop never waits for a network, and hears of a failure next time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_WAITING = 1000
CLOSE_TIMEOUT_S = 60.0


class InThread:
    """Passes calls on, in order. A call raises what an earlier one ended in, or RuntimeError where 1000 are waiting.

    `close` waits at most `close_timeout_s` for what is still to be sent: TimeoutError then.
    """

    def __init__(self, name: str, tracker: Any, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._name, self._tracker, self._close_timeout_s = name, tracker, close_timeout_s
        self._calls: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(MOST_WAITING)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._pass_on(self._tracker.log, dict(metrics), step)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._pass_on(self._tracker.table, name, list(rows), step)

    def close(self, error: str | None) -> None:
        deadline = time.monotonic() + self._close_timeout_s
        try:
            for last in ((self._tracker.close, (error,)), None):
                self._calls.put(last, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"{self._calls.qsize()} calls were not sent within {self._close_timeout_s:g} s")
        self._raise_earlier()

    def _pass_on(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            self._calls.put_nowait((work, arguments))
        except queue.Full:
            raise RuntimeError(f"{MOST_WAITING} earlier calls are still waiting to be sent") from None
        self._raise_earlier()

    def _raise_earlier(self) -> None:
        try:
            raise self._errors.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, arguments = call
            try:
                work(*arguments)
            except Exception as error:
                self._errors.put(error)
