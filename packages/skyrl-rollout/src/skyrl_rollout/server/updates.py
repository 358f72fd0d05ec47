"""The life of a weight update: open, sealed, committing, committed, or aborted, or failed; pure."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from skyrl_rollout.errors import (
    UnknownUpdate,
    UpdateIdReused,
    VersionConflict,
    VersionReused,
    WrongState,
)
from skyrl_rollout.server.engine import CollectiveTransfer
from skyrl_rollout.weights.manifest import Manifest

UPDATES_KEPT = 64
POLICIES_REMEMBERED = 1024  # whose last version is known, so that it never goes back


class UpdateState(enum.IntEnum):
    """The values are those of the protocol."""

    OPEN = 1
    SEALED = 2
    COMMITTING = 3
    COMMITTED = 4
    ABORTED = 5
    FAILED = 6


MOVES = {
    UpdateState.OPEN: {UpdateState.SEALED, UpdateState.ABORTED},
    UpdateState.SEALED: {UpdateState.COMMITTING, UpdateState.ABORTED},
    UpdateState.COMMITTING: {UpdateState.COMMITTED, UpdateState.FAILED},
}
REMEDIES = {
    UpdateState.OPEN: "bring all its bytes, then SealUpdate",
    UpdateState.SEALED: "CommitUpdate or AbortUpdate is next",
    UpdateState.COMMITTING: "wait for the reply of CommitUpdate",
    UpdateState.COMMITTED: "publish other weights as a later version",
    UpdateState.ABORTED: "begin again under a new update_id",
    UpdateState.FAILED: "begin again under a new update_id",
}


@dataclass(frozen=True)
class CommitReport:
    """frozen, aborted: requests. stall_s: how long no token was produced."""

    weight_version: int
    previous_version: int
    frozen: int = 0
    aborted: int = 0
    stall_s: float = 0.0


@dataclass
class Update:
    """transport: "inline", "shm", "file", or "collective" with its `transfer`. segments: shard -> shared memory name.
    folder: names from the update root to the folder of files. report: set by the commit. on_move: called after every
    change of `state`."""

    update_id: str
    manifest: Manifest
    transport: str
    compression: str = "none"
    segments: dict[int, str] = field(default_factory=dict)
    folder: tuple[str, ...] = ()
    transfer: CollectiveTransfer | None = None
    lease_s: float = 300.0
    state: UpdateState = UpdateState.OPEN
    report: CommitReport | None = None
    on_move: Callable[[Update], None] | None = field(default=None, repr=False, compare=False)

    @property
    def is_staged(self) -> bool:
        """Whether its bytes wait beside the live weights, where they can be checked."""
        return self.transfer is None

    @property
    def content(self) -> tuple[object, ...] | None:
        """Equal for two updates that lead to the same weights; None where nothing proves what the bytes are."""
        m = self.manifest
        return (m.digest, m.lora) if all(t.content_digest for t in m.tensors) else None

    @property
    def is_live(self) -> bool:
        return self.state in (UpdateState.OPEN, UpdateState.SEALED, UpdateState.COMMITTING)

    def move(self, state: UpdateState) -> None:
        """Raises WrongState for a move that its life does not have."""
        if state not in MOVES.get(self.state, ()):
            raise WrongState(f"update {self.update_id} is {self.state.name}: it cannot become {state.name}")
        self.state = state
        if self.on_move is not None:
            self.on_move(self)

    def need(self, *states: UpdateState, what: str) -> None:
        """Raises WrongState, naming `what` was asked, unless the update is in one of `states`."""
        if self.state not in states:
            names = " or ".join(s.name for s in states)
            raise WrongState(
                f"{what} needs an update that is {names}, {self.update_id} is {self.state.name}: {REMEDIES[self.state]}"
            )


class UpdateBook:
    """Every update of this instance, the live one and the last ended ones. on_move: called when one is opened and after
    each change of its state."""

    def __init__(self) -> None:
        self.on_move: Callable[[Update], None] | None = None
        self._updates: OrderedDict[str, Update] = OrderedDict()
        self._committed: OrderedDict[str, tuple[int, tuple[object, ...] | None]] = OrderedDict()

    @property
    def live(self) -> Update | None:
        return next((u for u in reversed(self._updates.values()) if u.is_live), None)

    def get(self, update_id: str) -> Update:
        """Raises UnknownUpdate."""
        if update_id not in self._updates:
            raise UnknownUpdate(
                f"no update {update_id!r} here: the server restarted, or it ended long ago; begin again"
            )
        return self._updates[update_id]

    def begin(self, update: Update, *, current_version: int, serves: bool = True) -> tuple[Update, bool]:
        """(the update, whether it is new). The same id with the same manifest attaches; content that is committed
        already under its version comes back COMMITTED where the server still `serves` it, else it may be loaded again.

        Raises UpdateIdReused, VersionReused, VersionConflict, or WrongState while another update is live.
        """
        known = self._updates.get(update.update_id)
        if known is not None:
            if known.manifest != update.manifest:
                raise UpdateIdReused(f"update id {update.update_id} was used for another manifest: mint a new one")
            return known, False
        target = update.manifest.target_version
        version, content = self._committed.get(update.manifest.policy_id, (0, None))
        is_committed = target == version and content is not None and content == update.content
        if is_committed and serves:
            update.state = UpdateState.COMMITTED
            update.report = CommitReport(target, target)
        elif not is_committed and target <= max(current_version, version):
            raise _stale(update.manifest, max(current_version, version))
        elif (live := self.live) is not None:
            raise WrongState(
                f"update {live.update_id} is {live.state.name}: abort or commit it before another begins",
                details={"update_id": live.update_id},
            )
        self._updates[update.update_id] = update
        update.on_move = self.on_move
        if self.on_move is not None and update.is_live:
            self.on_move(update)
        self._forget_ended()
        return update, True

    def committed(self, update: Update, report: CommitReport) -> None:
        update.report = report
        update.move(UpdateState.COMMITTED)
        policy_id = update.manifest.policy_id
        self._committed[policy_id] = (report.weight_version, update.content)
        self._committed.move_to_end(policy_id)
        while len(self._committed) > POLICIES_REMEMBERED:
            self._committed.popitem(last=False)

    def _forget_ended(self) -> None:
        ended = [u.update_id for u in self._updates.values() if not u.is_live]
        for update_id in ended[: max(len(self._updates) - UPDATES_KEPT, 0)]:
            del self._updates[update_id]


def _stale(manifest: Manifest, current: int) -> VersionReused | VersionConflict:
    details = {"current_version": str(current)}
    if manifest.policy_id and manifest.target_version == current:
        return VersionReused(
            f"version {current} of policy {manifest.policy_id!r} was committed with other content: publish as "
            f"{current + 1}",
            details=details,
        )
    return VersionConflict(
        f"target_version is {manifest.target_version} and version {current} is committed: versions only grow, publish "
        f"as {current + 1}",
        details=details,
    )
