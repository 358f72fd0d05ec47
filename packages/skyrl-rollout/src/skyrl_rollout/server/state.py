"""What the server is doing, which weight version serves, and who may start work right now."""

from __future__ import annotations

import enum
import uuid

from skyrl_rollout.errors import Draining, Paused, Poisoned, WrongState
from skyrl_rollout.server.signals import Signal


class EngineState(enum.IntEnum):
    """The values are those of the protocol."""

    LOADING = 1
    SERVING = 2
    PAUSING = 3
    PAUSED = 4
    COMMITTING = 5
    ASLEEP = 6
    AWAITING_WEIGHTS = 7
    POISONED = 8
    DRAINING = 9


FINAL = (EngineState.POISONED, EngineState.DRAINING)


class ServerState:
    """One per server; `changed` fires at every move and at every commit."""

    def __init__(self) -> None:
        self.instance_id = str(uuid.uuid4())
        self.state = EngineState.SERVING
        self.rejects_new_work = False
        self.weight_version = 0
        self.wedged = False
        self.changed = Signal()

    def move(self, state: EngineState, *, rejects_new_work: bool = False) -> None:
        """Enters `state`; a draining or poisoned server stays what it is, except that a poisoned one may drain."""
        if self.state in FINAL and state is not EngineState.DRAINING:
            return
        self.state, self.rejects_new_work = state, rejects_new_work
        self.changed.fire()

    def committed(self, version: int) -> None:
        self.weight_version = version
        self.changed.fire()

    def set_wedged(self, wedged: bool) -> None:
        if wedged != self.wedged:
            self.wedged = wedged
            self.changed.fire()

    @property
    def takes_work(self) -> bool:
        """Whether a request sent to this server is accepted, if only to be queued."""
        refusing = (EngineState.ASLEEP, EngineState.AWAITING_WEIGHTS, EngineState.LOADING, *FINAL)
        return self.state not in refusing and not self.rejects_new_work and not self.wedged

    def refuse_new_work(self) -> None:
        """Raises the reason why a request cannot even be queued; returns when it can."""
        if self.state is EngineState.DRAINING:
            raise Draining("this server is shutting down: send the request to another replica")
        if self.state is EngineState.POISONED:
            raise Poisoned("a weight update failed half way: restart this server and publish again")
        if self.state in (EngineState.ASLEEP, EngineState.AWAITING_WEIGHTS):
            raise WrongState(f"the server is {self.state.name}: wake it up and commit weights first")
        if self.rejects_new_work:
            raise Paused("the server is paused and refuses new work: retry after Resume", retry_after_s=1.0)

    async def admission(self, min_version: int) -> None:
        """Returns when work may start under `min_version` or newer; the caller's deadline bounds the wait."""
        while True:
            self.refuse_new_work()
            if self.state is EngineState.SERVING and self.weight_version >= min_version:
                return
            await self.changed.wait()
