"""How environments run beside the event loop: a fixed number of threads, a deadline per call, and no silent failure.

An environment that raises, returns no finite reward or does not answer in time ends the run with its name and the
sample's; it never becomes a reward of 0.
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
Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future]


class EnvironmentFailed(RunFailed):
    """An environment could not score a sample. The message names both."""


class EnvironmentThreads:
    """Runs blocking calls in at most `max_workers` daemon threads, which start as they are needed.

    Daemon threads, because an environment that hangs must not keep the process from ending; they live as long as it.
    """

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._slots = asyncio.Semaphore(max_workers)

    async def call(self, work: Callable[[], R], *, name: str, timeout_s: float) -> R:
        """`work()` in a thread, at most `timeout_s` once it has one. Raises EnvironmentFailed, which begins with
        `name`, for whatever goes wrong; a call that is late is left to finish alone."""
        async with self._slots:
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
        future: asyncio.Future[R] = loop.create_future()
        if self._running >= len(self._threads) and len(self._threads) < self.max_workers:
            thread = threading.Thread(target=self._run, name=f"environment-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._running += 1
        self._jobs.put((work, loop, future))
        try:
            return await future
        finally:
            self._running -= 1

    def _run(self) -> None:
        while True:
            work, loop, future = self._jobs.get()
            try:
                outcome, error = work(), None
            except BaseException as raised:
                outcome, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, outcome, error)
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
        return await self._threads.call(end, name=name, timeout_s=self._timeout_s)

    def abandon(self) -> None:
        """Closes the environment of a trajectory that did not end; the error that ended it is the one to raise."""
        try:
            self._env.close()
        except Exception as error:
            log.warning("environment %r on %s could not be closed either: %r", self.env_class, self.where, error)
