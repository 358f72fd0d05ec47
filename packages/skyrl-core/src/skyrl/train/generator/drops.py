"""What becomes of a sample that its environment could not score: the run ends, or it is left out, named and counted."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

from skyrl.train.environments import EnvironmentFailed
from skyrl.train.failures import RunFailed

log = logging.getLogger(__name__)
R = TypeVar("R")
KEY = "environment.on_error"


class NothingLeft(RunFailed):
    """Every sample that was asked for was left out."""


class Drops:
    """`on_error` is `stop` or `drop`. What was left out is kept by phase until `taken` asks for it."""

    def __init__(self, on_error: str) -> None:
        self.allowed = on_error == "drop"
        self._messages: dict[str, list[str]] = defaultdict(list)

    async def guard(self, work: Awaitable[R], phase: str, on_drop: Callable[[], None]) -> R | None:
        """The result, or None for a sample that is left out. EnvironmentFailed is raised where the run is to end."""
        try:
            return await work
        except EnvironmentFailed as error:
            if not self.allowed:
                raise
            self._messages[phase].append(str(error))
            log.warning("a sample is left out (%s=drop): %s", KEY, error)
            on_drop()
            return None

    def require_some(self, kept: int, asked: int, phase: str) -> None:
        """Raises NothingLeft, with the first reason, where no sample is left to go on with."""
        if kept == 0 and asked > 0:
            first = self._messages[phase][-asked:][0]
            raise NothingLeft(f"all {asked} samples were left out ({KEY}=drop), the first because {first}")

    def taken(self, phase: str) -> int:
        """How many samples of that phase were left out since it was asked last."""
        return len(self._messages.pop(phase, []))
