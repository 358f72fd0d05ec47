"""When this process ends: on SIGTERM, or when the trainer that started it is gone; both drain before they stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from skyrl_rollout.server.committing import Updater
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.state import EngineState, ServerState

logger = logging.getLogger(__name__)

PARENT_FD_VARIABLE = "SKYRL_PARENT_FD"
LAST_READ_S = 2.0  # how long readers may take to fetch the last events of a drained server
KILL_SLACK_S = 10.0  # what an engine may take to close once its parent is gone


def stop_requested() -> asyncio.Future[str]:
    """A future that gets the signal's name when SIGTERM or SIGINT arrives."""
    loop = asyncio.get_running_loop()
    reason: asyncio.Future[str] = loop.create_future()

    def stop(name: str) -> None:
        if not reason.done():
            reason.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    return reason


async def drain(runs: RunRegistry, updater: Updater, state: ServerState, grace_s: float) -> None:
    """Refuses new work, ends queued work, lets running work finish for `grace_s`, then ends it with ABORTED.

    Frozen work cannot finish, so it is ended at once. Returns when every reader has its last event, or LAST_READ_S
    after the work ended.
    """
    frozen = state.state is not EngineState.SERVING
    state.move(EngineState.DRAINING)
    updater.abort_live()
    runs.drop_queued()
    if not frozen:
        await _within(grace_s, runs.all_ended())
    await _within(LAST_READ_S, _all_aborted(runs))
    runs.drop_all()
    await _within(LAST_READ_S, runs.all_read())


async def _all_aborted(runs: RunRegistry) -> None:
    await runs.abort(runs.active_ids())  # an engine that stands still does not return from it
    await runs.all_ended()


async def _within(seconds: float, work: Awaitable[None]) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(work, max(seconds, 0.01))


class ParentWatch:
    """Watches the pipe named by $SKYRL_PARENT_FD from a thread, so that it works while an engine blocks the loop.

    At its end of file `on_gone` is called; when the process still lives after `kill_after_s`, its group is killed.
    """

    def __init__(self, *, kill_after_s: float) -> None:
        self._kill_after_s = kill_after_s + KILL_SLACK_S
        self._on_gone: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._gone = False

    @classmethod
    def from_environment(cls, *, kill_after_s: float) -> ParentWatch | None:
        """None without $SKYRL_PARENT_FD. Raises ValueError when it is not the number of an open file."""
        text = os.environ.pop(PARENT_FD_VARIABLE, None)
        if text is None:
            return None
        try:
            fd = int(text)
            os.set_inheritable(fd, False)  # a child that held the pipe open would not hurt, but must not read it
        except (ValueError, OSError) as error:
            raise ValueError(f"{PARENT_FD_VARIABLE}={text} is not an open file descriptor: {error}") from None
        watch = cls(kill_after_s=kill_after_s)
        threading.Thread(target=watch._wait, args=(fd,), name="parent-watch", daemon=True).start()
        return watch

    @property
    def is_gone(self) -> bool:
        return self._gone

    def call_when_gone(self, on_gone: Callable[[], None]) -> None:
        """From now on a gone parent leads to `on_gone`; before, while the engine is built, the group is killed."""
        with self._lock:
            self._on_gone = on_gone
            gone = self._gone
        if gone:
            on_gone()

    def _wait(self, fd: int) -> None:
        while True:
            try:
                if not os.read(fd, 1024):
                    break
            except InterruptedError:
                continue
            except OSError:
                break
        with self._lock:
            self._gone, on_gone = True, self._on_gone
        logger.warning("the process that started this server is gone: stopping")
        if on_gone is not None:
            on_gone()
            threading.Event().wait(self._kill_after_s)
        kill_own_group()


def kill_own_group() -> None:
    """SIGKILL for this process, and for its process group where it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
