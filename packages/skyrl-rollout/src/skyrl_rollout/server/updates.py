"""The life of a weight update: open, sealed, committing, committed, or aborted, or failed; pure."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from skyrl_rollout.errors import (
    InvalidRequest,
    ModelMismatch,
    UnknownUpdate,
    UpdateIdReused,
    VersionConflict,
    WrongState,
)
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, differences

UPDATES_KEPT = 64
DIGEST_BYTES = 16


class UpdateState(enum.IntEnum):
    """The values are those of the protocol."""

    OPEN = 1
    SEALED = 2
    COMMITTING = 3
    COMMITTED = 4
    ABORTED = 5
    FAILED = 6


MOVES = {
    UpdateState.OPEN: {UpdateState.SEALED, UpdateState.ABORTED, UpdateState.COMMITTED},
    UpdateState.SEALED: {UpdateState.COMMITTING, UpdateState.ABORTED},
    UpdateState.COMMITTING: {UpdateState.COMMITTED, UpdateState.FAILED},
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
    """transport: "inline" or "shm". segments: shard -> shared memory name. report: set by the commit."""

    update_id: str
    manifest: Manifest
    transport: str
    compression: str = "none"
    segments: dict[int, str] = field(default_factory=dict)
    state: UpdateState = UpdateState.OPEN
    report: CommitReport | None = None

    @property
    def is_live(self) -> bool:
        return self.state in (UpdateState.OPEN, UpdateState.SEALED, UpdateState.COMMITTING)

    def move(self, state: UpdateState) -> None:
        """Raises WrongState for a move that its life does not have."""
        if state not in MOVES.get(self.state, ()):
            raise WrongState(f"update {self.update_id} is {self.state.name}: it cannot become {state.name}")
        self.state = state

    def need(self, *states: UpdateState, what: str) -> None:
        """Raises WrongState, naming `what` was asked, unless the update is in one of `states`."""
        if self.state not in states:
            names = " or ".join(s.name for s in states)
            raise WrongState(f"{what} needs an update that is {names}; {self.update_id} is {self.state.name}")


class UpdateBook:
    """Every update of this instance, the live one and the last ended ones."""

    def __init__(self) -> None:
        self._updates: OrderedDict[str, Update] = OrderedDict()
        self._committed: tuple[int, bytes] = (0, b"")

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

    def begin(self, update: Update, *, current_version: int) -> tuple[Update, bool]:
        """(the update, whether it is new). The same id with the same manifest attaches; content that is committed
        already under its version comes back COMMITTED.

        Raises UpdateIdReused, VersionConflict, or WrongState while another update is live.
        """
        known = self._updates.get(update.update_id)
        if known is not None:
            if known.manifest.digest != update.manifest.digest or (
                known.manifest.target_version != update.manifest.target_version
            ):
                raise UpdateIdReused(f"update id {update.update_id} was used for another manifest: mint a new one")
            return known, False
        target = update.manifest.target_version
        if (target, update.manifest.digest) == self._committed:
            update.state = UpdateState.COMMITTED
            update.report = CommitReport(target, target)
        elif target <= current_version:
            raise VersionConflict(
                f"target_version is {target} and version {current_version} is committed: versions only grow, publish "
                f"as {current_version + 1}",
                details={"current_version": str(current_version)},
            )
        elif (live := self.live) is not None:
            raise WrongState(
                f"update {live.update_id} is {live.state.name}: abort or commit it before another begins",
                details={"update_id": live.update_id},
            )
        self._updates[update.update_id] = update
        while len(self._updates) > UPDATES_KEPT:
            self._updates.popitem(last=False)
        return update, True

    def committed(self, update: Update, report: CommitReport) -> None:
        update.move(UpdateState.COMMITTED)
        update.report = report
        self._committed = (report.weight_version, update.manifest.digest)


def check_manifest(manifest: Manifest, claimed_digest: bytes, model: Sequence[TensorLayout]) -> None:
    """Raises ModelMismatch naming every tensor that does not fit, InvalidRequest for a manifest at odds with itself."""
    names = [t.layout.name for t in manifest.tensors]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise InvalidRequest(f"the manifest names tensors twice: {', '.join(twice[:5])}")
    wrong = differences((t.layout for t in manifest.tensors), model)
    if wrong:
        raise ModelMismatch(
            f"{len(wrong)} tensors do not fit the served model: {'; '.join(wrong[:3])}",
            violations=[("manifest.tensors[" + w.split(":", 1)[0] + "]", w) for w in wrong],
        )
    bad = [t.layout.name for t in manifest.tensors if len(t.content_digest) != DIGEST_BYTES]
    if bad:
        raise InvalidRequest(f"content_digest must be {DIGEST_BYTES} bytes (xxh3-128): {', '.join(bad[:5])}")
    if manifest.digest != claimed_digest:
        raise InvalidRequest("manifest.digest is not the digest of the manifest's tensors")
    _check_overlap(manifest)


def _check_overlap(manifest: Manifest) -> None:
    ends: dict[int, tuple[int, str]] = {}
    for t in sorted(manifest.tensors, key=lambda t: (t.shard, t.offset)):
        end, before = ends.get(t.shard, (0, ""))
        if t.offset < end:
            raise InvalidRequest(f"tensors {before} and {t.layout.name} overlap in shard {t.shard}")
        ends[t.shard] = (t.offset + t.layout.nbytes, t.layout.name)
