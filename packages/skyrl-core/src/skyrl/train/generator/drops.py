"""What becomes of a sample that its environment could not score: the run ends, or it is left out, named and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from skyrl.train.environments import EnvironmentFailed
from skyrl.train.failures import RunFailed

log = logging.getLogger(__name__)
R = TypeVar("R")
KEY = "environment.on_error"


class NothingLeft(RunFailed):
    """Every sample that was asked for was left out."""


class Drops:
    """`on_error` is `stop` or `drop`. What was left out is counted by phase until `taken` asks for it."""

    def __init__(self, on_error: str) -> None:
        self.allowed = on_error == "drop"
        self._counts: Counter[str] = Counter()

    async def guard(self, work: Awaitable[R], phase: str, reasons: list[str], on_drop: Callable[[], None]) -> R | None:
        """The result, or None for a sample that is left out, which adds to `reasons`. EnvironmentFailed is raised where
        the run is to end."""
        try:
            return await work
        except EnvironmentFailed as error:
            if not self.allowed:
                raise
            self._counts[phase] += 1
            reasons.append(str(error))
            log.warning("a sample is left out (%s=drop): %s", KEY, error)
            on_drop()
            return None

    def taken(self, phase: str) -> int:
        """How many samples of that phase were left out since it was asked last."""
        return self._counts.pop(phase, 0)


def require_some(kept: int, asked: int, reasons: Sequence[str]) -> None:
    """Raises NothingLeft, with the first of the `reasons` of one call, where no sample is left to go on with."""
    if kept > 0 or asked == 0:
        return
    if not reasons:
        raise NothingLeft(f"the generator made none of the {asked} samples that it was asked for")
    raise NothingLeft(f"all {asked} samples were left out ({KEY}=drop), the first because {reasons[0]}")
