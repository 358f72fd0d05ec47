"""How environments run beside the event loop: a fixed number of threads, a deadline per call, and no silent failure.

An environment that raises, returns no finite reward or does not answer in time is an error with its name and the
sample's; it never becomes a reward of 0. A thread that it keeps for ever is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from skyrl_gym.envs.base_text_env import BaseTextEnv

from skyrl.train.environments import registry
from skyrl.train.failures import RunFailed

log = logging.getLogger(__name__)
R = TypeVar("R")
LARGEST_REWARD = float(np.finfo(np.float32).max)
MOST_STUCK_PER_WORKER = 4
CLOSE_TIMEOUT_S = 5.0


class EnvironmentFailed(RunFailed):
    """An environment could not score a sample. The message names both."""


class EnvironmentsStuck(RunFailed):
    """So many calls never returned that the run cannot go on, whatever is done about their samples."""


@dataclass
class _Job:
    """One call: `thread` runs it, `ended` once it has returned, `late` once nobody waits for it any more."""

    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    thread: threading.Thread | None = None
    ended: bool = False
    late: bool = False


class EnvironmentThreads:
    """Runs blocking calls in at most `max_workers` daemon threads, which start as they are needed.

    Daemon threads, because an environment that hangs must not keep the process from ending; they live as long as it.
    A thread whose call is late is replaced; `stuck` counts those that have not come back.
    """

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self.stuck = 0
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of `stuck`, `_threads` and the jobs' state
        self._running = 0
        self._slots = asyncio.Semaphore(max_workers)

    async def call(self, work: Callable[[], R], *, name: str, timeout_s: float) -> R:
        """`work()` in a thread, at most `timeout_s` once it has one. Raises EnvironmentFailed, which begins with
        `name`, for whatever goes wrong, and EnvironmentsStuck where too many calls never returned; a call that is late
        is left to finish alone."""
        async with self._slots:
            if self.stuck >= MOST_STUCK_PER_WORKER * self.max_workers:
                raise EnvironmentsStuck(
                    f"{name} was not called: {self.stuck} earlier calls of environments have not returned, and a "
                    f"thread cannot be ended: give the environment a time-out of its own for what it waits for"
                )
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    return await self._submit(work)
            except EnvironmentFailed:
                raise
            except Exception as error:
                if deadline.expired():
                    raise EnvironmentFailed(f"{name} did not answer within {timeout_s:g} s") from error
                raise EnvironmentFailed(f"{name} raised {type(error).__name__}: {error}{_place(error)}") from error

    async def _submit(self, work: Callable[[], R]) -> R:
        loop = asyncio.get_running_loop()
        job = _Job(work, loop, loop.create_future())
        if self._running >= len(self._threads) and len(self._threads) < self.max_workers:
            thread = threading.Thread(target=self._run, name=f"environment-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._running += 1
        self._jobs.put(job)
        try:
            return await job.future
        finally:
            self._running -= 1
            self._leave(job)

    def _leave(self, job: _Job) -> None:
        """Nobody waits for the job any more: where it still runs, its thread is one of the stuck from now on."""
        with self._lock:
            if job.ended:
                return
            job.late = True
            if job.thread is not None:
                self._threads.remove(job.thread)
                self.stuck += 1

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                if job.late:
                    continue
                job.thread = threading.current_thread()
            try:
                outcome, error = job.work(), None
            except BaseException as raised:
                outcome, error = None, raised
            with self._lock:
                job.ended = True
                if job.late:
                    self.stuck -= 1
                    return  # another thread has this one's place
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, outcome, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def _settle(future: asyncio.Future, outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, StopIteration) or not isinstance(error, Exception):
        # asyncio refuses StopIteration in a future, and sys.exit() in an environment must not end the run as done
        future.set_exception(RuntimeError(repr(error)).with_traceback(error.__traceback__))
    else:
        future.set_exception(error)


def _place(error: Exception) -> str:
    """' (file:line)' of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


@dataclass(frozen=True)
class EnvStep:
    """One answer of an environment. `action` is the text it wants remembered in place of the one given, or None."""

    reward: float
    done: bool
    observations: list[dict[str, str]] = field(default_factory=list)
    action: str | None = None


class Episode:
    """One environment over the turns of one trajectory. `where` names the sample in errors."""

    def __init__(
        self, env: BaseTextEnv, env_class: str, where: str, *, threads: EnvironmentThreads, timeout_s: float
    ) -> None:
        self.env_class = env_class
        self.where = where
        self.turns = 0
        self.finished = False
        self._env = env
        self._threads = threads
        self._timeout_s = timeout_s

    @staticmethod
    async def start(
        env_class: str,
        messages: list[dict[str, str]],
        *,
        where: str,
        env_config: Any,
        extras: dict[str, Any],
        threads: EnvironmentThreads,
        timeout_s: float,
    ) -> tuple[Episode, list[dict[str, str]]]:
        """Makes the environment and returns the messages that it wants the model to see first."""

        def begin() -> tuple[BaseTextEnv, list[dict[str, str]]]:
            env = registry.make(env_class, env_config=env_config, extras=extras)
            first, _ = env.init(messages)
            return env, first

        name = f"environment {env_class!r} at the start of {where}"
        env, first = await threads.call(begin, name=name, timeout_s=timeout_s)
        if not first or not all(isinstance(m, dict) and "role" in m and "content" in m for m in first):
            raise EnvironmentFailed(f"{name} returned {first!r:.200} from init: expected a list of messages")
        return Episode(env, env_class, where, threads=threads, timeout_s=timeout_s), first

    async def step(self, action: str) -> EnvStep:
        """Scores one assistant turn. EnvironmentFailed for an error, a time-out or a reward that is no number."""
        self.turns += 1
        name = f"environment {self.env_class!r} on {self.where}, turn {self.turns}"
        out = await self._threads.call(lambda: self._env.step(action), name=name, timeout_s=self._timeout_s)
        try:
            reward = float(out["reward"])
            step = EnvStep(reward, bool(out["done"]), list(out["observations"] or []), out.get("postprocessed_action"))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise EnvironmentFailed(
                f"{name} returned {out!r:.200}: expected observations, a number as reward, done and metadata"
            ) from error
        if not abs(reward) <= LARGEST_REWARD:
            raise EnvironmentFailed(f"{name} returned the reward {reward}: a reward must be a finite float32 number")
        return step

    async def finish(self) -> dict[str, Any]:
        """The environment's metrics of this episode; the environment is closed."""

        def end() -> dict[str, Any]:
            try:
                return dict(self._env.get_metrics() or {})
            finally:
                self._env.close()

        name = f"environment {self.env_class!r} at the end of {self.where}"
        self.finished = True
        return await self._threads.call(end, name=name, timeout_s=self._timeout_s)

    async def abandon(self) -> None:
        """Closes the environment of a trajectory that did not end; the error that ended it is the one to raise."""
        name = f"environment {self.env_class!r} on {self.where}, which is given up,"
        try:
            await self._threads.call(self._env.close, name=name, timeout_s=CLOSE_TIMEOUT_S)
        except RunFailed as error:
            log.warning("not closed either: %s", error)
