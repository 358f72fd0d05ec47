"""One thread that makes the steps, and runs between two of them whatever the event loop asks for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)
R = TypeVar("R")


class Worker:
    """`can_step`, `step` and `failed` are called on its thread only, and so is everything that is given to `call`."""

    def __init__(
        self, *, can_step: Callable[[], bool], step: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self._can_step, self._step, self._failed = can_step, step, failed
        self._asked: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine steps", daemon=True)
        self._thread.start()

    @property
    def is_asked(self) -> bool:
        """Whether something waits for the end of the step."""
        return bool(self._asked)

    def post(self, work: Callable[[], R]) -> Future[R]:
        """Runs `work` between two steps; does not wait. Nothing is run after `close`."""
        future: Future[R] = Future()
        with self._changed:
            self._asked.append((work, future))
            self._changed.notify()
        return future

    async def call(self, work: Callable[[], R]) -> R:
        """Runs `work` between two steps and returns what it returned, or raises what it raised."""
        return await asyncio.shield(asyncio.wrap_future(self.post(work)))

    async def close(self) -> None:
        """Ends the thread after the step that it makes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closed or self._asked or self._can_step()):
                    self._changed.wait()
                if self._is_closed:
                    return
            self._answer()
            if self._can_step():
                try:
                    self._step()
                except Exception as error:
                    logger.exception("a step failed")
                    self._failed(error)

    def _answer(self) -> None:
        while self._asked:
            work, future = self._asked.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
