"""What one conformance item is, and the three ways in which it can end other than well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from skyrl_rollout.conformance.target import Target

PASSED, FAILED, NOT_RUN, NOT_OFFERED = "passed", "failed", "not run", "not offered"
STATUSES = (PASSED, FAILED, NOT_RUN, NOT_OFFERED)

Check = Callable[["Target"], Awaitable[str | None]]


class Failed(Exception):
    """The server does something else than the protocol says; the message is one sentence with what was expected."""


class NotRun(Exception):
    """Something that the check needs is not there; the message names it."""


class NotOffered(Exception):
    """The server does not list a capability that the check is about; the message names it."""


@dataclass(frozen=True)
class Item:
    """One sentence that a server keeps, and the check that proves it.

    check: returns a note for the table, or None. needs: of "wire", "model", "launcher", "credentials", "second server".
    capability: what the server must list ("lora", "transports:shm"), None where every server has to pass. engine: what
    it shows needs logits (E); the reference server stands in with its canary. when: "alone" on the server, "beside"
    others, or at the "end", because it kills the server.
    """

    number: int
    title: str
    check: Check
    needs: tuple[str, ...] = ("wire",)
    capability: str | None = None
    engine: bool = False
    when: Literal["alone", "beside", "end"] = "alone"
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """How an item ended. reason: why it failed, what it needs, the capability, or what a passed one has to add."""

    item: Item
    status: str
    reason: str = ""
    seconds: float = 0.0


def expect(holds: bool, sentence: str) -> None:
    """Raises Failed with the sentence unless it holds."""
    if not holds:
        raise Failed(sentence)
