"""What the server is doing, which weight version of which policy serves, and who may start work right now."""

from __future__ import annotations

import enum
import uuid

from skyrl_rollout.errors import Draining, Paused, Poisoned, UnknownPolicy, WrongState
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
UNAVAILABLE = (EngineState.ASLEEP, EngineState.AWAITING_WEIGHTS)  # no memory, or no weights, to serve with
BASE_POLICY = ""  # policy_id of the model itself


class ServerState:
    """One per server; `changed` fires at every move and at every commit. versions: policy_id -> committed version, of
    the base and of every adapter that is loaded."""

    def __init__(self) -> None:
        self.instance_id = str(uuid.uuid4())
        self.state = EngineState.SERVING
        self.rejects_new_work = False
        self.versions = {BASE_POLICY: 0}
        self.wedged = False
        self.asleep: frozenset[str] = frozenset()  # what gave its memory back, of "weights" and "kv_cache"
        self.weights_lost = False  # discarded, and nothing was published since
        self.changed = Signal()

    def move(self, state: EngineState, *, rejects_new_work: bool = False) -> None:
        """Enters `state`; a draining or poisoned server stays what it is, except that a poisoned one may drain."""
        if self.state in FINAL and state is not EngineState.DRAINING:
            return
        self.state, self.rejects_new_work = state, rejects_new_work
        self.changed.fire()

    @property
    def resting(self) -> EngineState | None:
        """ASLEEP or AWAITING_WEIGHTS while the engine cannot make tokens whether or not it is paused, else None."""
        if self.asleep:
            return EngineState.ASLEEP
        return EngineState.AWAITING_WEIGHTS if self.weights_lost else None

    @property
    def weight_version(self) -> int:
        """The committed version of the base policy; 0 is the model as loaded."""
        return self.versions[BASE_POLICY]

    def version_of(self, policy_id: str) -> int:
        """The committed version of a policy. Raises UnknownPolicy: another one never serves in its place."""
        if policy_id not in self.versions:
            raise UnknownPolicy(
                f"policy {policy_id!r} is not loaded here: publish it (again: new base weights drop every adapter), or "
                f"leave policy_id empty for the base policy"
            )
        return self.versions[policy_id]

    def committed(self, version: int, policy_id: str = BASE_POLICY) -> None:
        self.versions[policy_id] = version
        self.changed.fire()

    def forget(self, policy_id: str) -> None:
        """The adapter is gone; requests that wait for it are told so."""
        self.versions.pop(policy_id, None)
        self.changed.fire()

    def set_wedged(self, wedged: bool) -> None:
        if wedged != self.wedged:
            self.wedged = wedged
            self.changed.fire()

    @property
    def takes_work(self) -> bool:
        """Whether a request sent to this server is accepted, if only to be queued."""
        refusing = (EngineState.LOADING, *UNAVAILABLE, *FINAL)
        return self.state not in refusing and not self.rejects_new_work and not self.wedged

    def refuse_new_work(self) -> None:
        """Raises the reason why a request cannot even be queued; returns when it can."""
        if self.state is EngineState.DRAINING:
            raise Draining("this server is shutting down: send the request to another replica")
        if self.state is EngineState.POISONED:
            raise Poisoned("a weight update failed half way: restart this server and publish again")
        if self.state is EngineState.ASLEEP:
            raise WrongState("the server is ASLEEP: call WakeUp first, or use another replica")
        if self.state is EngineState.AWAITING_WEIGHTS:
            raise WrongState("the server is AWAITING_WEIGHTS: publish every tensor first, or use another replica")
        if self.rejects_new_work:
            raise Paused("the server is paused and refuses new work: retry after Resume", retry_after_s=1.0)

    async def admission(self, min_version: int, policy_id: str = BASE_POLICY) -> None:
        """Returns when work may start under `min_version` of the policy or newer; the caller's deadline bounds the
        wait. Raises UnknownPolicy when the policy is dropped meanwhile."""
        while True:
            self.refuse_new_work()
            if self.version_of(policy_id) >= min_version and self.state is EngineState.SERVING:
                return
            await self.changed.wait()
