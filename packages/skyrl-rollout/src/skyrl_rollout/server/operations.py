"""One execution per operation id: a repeated call joins the running one, or gets the answer of the finished one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from skyrl_rollout.errors import Fenced

ANSWERS_KEPT = 1024


@dataclass
class _Operation:
    task: asyncio.Future[Any]
    interruptible: Callable[[], bool]
    callers: int = 0
    called_off: bool = False


class OperationBook:
    """Answers of finished operations, newest last, and the operations that run now."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()
        self._running: dict[Hashable, _Operation] = {}

    async def run(
        self, key: Hashable, start: Callable[[], Awaitable[Any]], *, interruptible: Callable[[], bool] = lambda: False
    ) -> Any:
        """The answer of `key`. When every caller has gone, the operation goes on unless `interruptible()` says it may
        be cancelled. A failure is not kept: the same id may be tried again."""
        if key in self._answers:
            return self._answers[key]
        if key not in self._running:
            task = asyncio.ensure_future(start())
            task.add_done_callback(lambda done: self._finish(key, done))
            self._running[key] = _Operation(task, interruptible)
        operation = self._running[key]
        operation.callers += 1
        try:
            return await asyncio.shield(operation.task)
        except asyncio.CancelledError:
            if operation.called_off:
                raise Fenced("a trainer with a higher epoch took over while this call waited: stop this one") from None
            if operation.callers == 1 and not operation.task.done() and interruptible():
                operation.task.cancel()
            raise
        finally:
            operation.callers -= 1

    def call_off(self) -> None:
        """Cancels every operation that may be; its callers are told that they are fenced."""
        for operation in list(self._running.values()):
            if operation.interruptible():
                operation.called_off = True
                operation.task.cancel()

    def _finish(self, key: Hashable, task: asyncio.Future[Any]) -> None:
        self._running.pop(key, None)
        if task.cancelled() or task.exception() is not None:
            return
        self._answers[key] = task.result()
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
