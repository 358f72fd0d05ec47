"""Which events of one request a reader still has to see; pure, so that any number of them may attach and come back."""

from __future__ import annotations

from skyrl_rollout.errors import RolloutError
from skyrl_rollout.server.events import Event


class EventLog:
    """Events numbered 1, 2, 3, ... Closed once, with or without an error."""

    __slots__ = ("_events", "closed", "error", "nbytes")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.closed = False
        self.error: RolloutError | None = None
        self.nbytes = 0

    @property
    def last_seq(self) -> int:
        return len(self._events)

    def append(self, event: Event, nbytes: int) -> None:
        assert not self.closed
        self._events.append(event)
        self.nbytes += nbytes

    def close(self, error: RolloutError | None = None) -> None:
        self.closed, self.error = True, error

    def after(self, seq: int) -> list[tuple[int, Event]]:
        """(seq, event) of everything later than `seq`."""
        return list(enumerate(self._events[seq:], seq + 1))
