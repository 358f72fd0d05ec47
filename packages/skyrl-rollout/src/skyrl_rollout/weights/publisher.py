"""New weights to every replica or to none: all servers have verified the bytes before the first one commits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_rollout.calls import Deadline
from skyrl_rollout.errors import MissingCapability
from skyrl_rollout.weights import shm
from skyrl_rollout.weights.arena import Arena
from skyrl_rollout.weights.delta import DeltaDraft
from skyrl_rollout.weights.file import UpdateFolder
from skyrl_rollout.weights.manifest import Lora, Manifest, TensorLayout
from skyrl_rollout.weights.two_phase import Round
from skyrl_rollout.weights.update import Cargo, PublishTarget, ServerUpdate

__all__ = ["PublishReport", "PublishTarget", "WeightPublisher"]

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shm", "inline", "file")
ON_FAILURE = ("drop", "abort")
COMPRESSIONS = ("none", "zstd")
AWAY_S = 10.0  # how long a replica may be away from an update that others go on with
_IN_THREAD_BYTES = 1 << 20  # a smaller copy is over before another thread would have begun it


@dataclass(frozen=True)
class PublishReport:
    """seconds: phase ("look", "copy", "begin", "transfer", "seal", "commit") -> wall clock. transports: url -> "shm",
    "inline" or "file". stall_s: the longest time that a replica produced no token. committed: urls that serve
    `target_version`; failed: url -> why, of replicas that do not and are STALE. kind: "full", "overwrite" (a delta) or
    "lora"."""

    target_version: int
    nbytes: int
    seconds: dict[str, float]
    transports: dict[str, str]
    stall_s: float
    committed: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    kind: str = "full"

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class WeightPublisher:
    """Keeps one arena between publishes, and in it the bytes that were published last, for replicas that missed them.

    transport: "auto" takes shared memory where the server can see ours, else the gRPC stream; "file" needs `folder`,
    which the servers see under the same path. compression: "none" or "zstd", of inline chunks. on_failure: what becomes
    of a publish when some replicas fail before the commit: "drop" leaves them out (they are STALE until `catch_up` or
    the next publish), "abort" ends it for all.
    """

    def __init__(
        self,
        transport: str = "auto",
        *,
        compression: str = "none",
        on_failure: str = "drop",
        folder: Path | None = None,
    ) -> None:
        known = {"transport": TRANSPORTS, "compression": COMPRESSIONS, "on_failure": ON_FAILURE}
        for name, value in (("transport", transport), ("compression", compression), ("on_failure", on_failure)):
            if value not in known[name]:
                raise ValueError(f"{name} {value!r} is not known: one of {', '.join(known[name])}")
        if (transport == "file") != (folder is not None):
            raise ValueError("transport='file' and folder go together: give both or none")
        self.transport, self.compression, self.on_failure, self.folder = transport, compression, on_failure, folder
        self._arena: Arena | None = None
        self._published: Manifest | None = None  # what lies in the arena, once a replica serves it
        self._adapters: dict[str, Cargo] = {}
        self._may_be_read = False  # a server whose update did not end may still map the arena
        self._publishing = False
        self._one_at_a_time = asyncio.Lock()
        for name in shm.remove_stale():
            log.warning("removed shared memory %s, left by a process that is gone", name)

    @property
    def published_version(self) -> int | None:
        """The version whose bytes `catch_up` can send; None before the first publish and after one that failed."""
        return None if self._published is None else self._published.target_version

    async def publish(
        self,
        layout: Sequence[TensorLayout],
        tensors: Iterable[tuple[str, memoryview]],
        targets: Sequence[PublishTarget],
        *,
        target_version: int,
        timeout_s: float,
        base_version: int | None = None,
    ) -> PublishReport:
        """Replaces the weights of all `targets` by `tensors`, each once and in any order, as version `target_version`.

        tensors is read on the calling thread, after every server has accepted the layout. base_version: send only what
        changed since then, where every target offers deltas and serves that version and it was published last here;
        else, and where more than half changed, all is sent (`report.kind` tells). Returns once every target serves the
        weights, or is named in `report.failed`. Raises ModelMismatch naming the tensors that differ (nothing was
        copied), ValueError for tensors that are not those of `layout`, VersionConflict, Fenced, CorruptBytes,
        ServerUnreachable, DeadlineExceeded: no replica moved.
        """
        if self._publishing:
            raise ValueError("a publish is under way on this publisher; wait for it")
        if not layout:
            raise ValueError("a publish needs tensors, the layout names none")
        self._publishing = True
        try:
            async with self._round(targets, timeout_s, f"publishing version {target_version}") as r:
                await r.step("look", ServerUpdate.look)
                for u in r.live:
                    u.check(layout, target_version)
                with r.timed("copy"):
                    cargo = await self._filled(layout, tensors, r, target_version, base_version)
                try:
                    report = await _send(r, cargo)
                finally:
                    if cargo.arena is not self._arena:
                        cargo.arena.close()
                assert self._arena is not None
                self._published = Manifest(target_version, self._arena.specs())
                self._drop_adapters()
                return report
        finally:
            self._publishing = False

    async def publish_adapter(
        self,
        policy_id: str,
        layout: Sequence[TensorLayout],
        tensors: Iterable[tuple[str, memoryview]],
        targets: Sequence[PublishTarget],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
        target_version: int,
        timeout_s: float,
    ) -> PublishReport:
        """Makes all `targets` serve the low-rank adapter `policy_id` over their base weights; as `publish`.

        Tensors are named as PEFT saves them. Raises MissingCapability where a target offers no adapters. The next full
        publish ends every adapter, which was trained over other weights.
        """
        if not policy_id or not layout:
            raise ValueError(f"an adapter needs a policy id and tensors, got {policy_id!r} and {len(layout)}")
        purpose = f"publishing version {target_version} of {policy_id}"
        async with self._round(targets, timeout_s, purpose) as r:
            await r.step("look", ServerUpdate.look)
            for u in r.live:
                u.info.capabilities.need("lora", f"{u.target.url}: taking adapter {policy_id!r}")
            base = Lora(r.live[0].info.model.fingerprint, rank, alpha, tuple(target_modules))
            with r.timed("copy"):
                arena = self._new_arena(layout, r.live)
                for name, data in tensors:
                    await _copy(arena, name, data)
                manifest = Manifest(target_version, arena.specs(), policy_id=policy_id, lora=base)
                cargo = Cargo(manifest, arena)
            try:
                report = await _send(r, await self._with_folder(cargo, r))
            except BaseException:
                arena.close()
                raise
            if policy_id in self._adapters:
                self._adapters.pop(policy_id).arena.close()
            self._adapters[policy_id] = cargo
            return report

    async def catch_up(self, targets: Sequence[PublishTarget], *, timeout_s: float) -> PublishReport:
        """Gives the bytes that were published last, and every adapter over them, to replicas that missed them.

        The report's `failed` names those that still have not got them. Raises ValueError where nothing is kept: before
        the first publish, and after one that failed.
        """
        if self._published is None or self._arena is None:
            raise ValueError("there are no published weights to catch up with: publish first")
        version = self._published.target_version
        async with self._round(targets, timeout_s, f"catching up with version {version}", impatient=True) as r:
            await r.step("look", ServerUpdate.look)
            for u in r.live:
                u.check(self._arena.layout, version, may_equal=True)
                self._choose(u)
                if u.transport == "shm" and not self._arena.shared:
                    u.transport = "inline"
            report = await _send(r, await self._with_folder(Cargo(self._published, self._arena), r))
        for policy_id, adapter in self._adapters.items():
            done = [t for t in targets if t.url in report.committed]
            async with self._round(done, timeout_s, f"catching up with {policy_id}", impatient=True) as r:
                await r.step("look", ServerUpdate.look)
                for u in r.live:
                    self._choose(u)
                await _send(r, await self._with_folder(adapter, r))
        return report

    async def _filled(
        self,
        layout: Sequence[TensorLayout],
        tensors: Iterable[tuple[str, memoryview]],
        round_: Round,
        target_version: int,
        base_version: int | None,
    ) -> Cargo:
        """The arena with the new bytes, or a smaller one with what changed."""
        arena = self._arena_for(layout, round_.live)
        offered = all(u.info.capabilities.delta and u.info.weight_version == base_version for u in round_.live)
        draft = DeltaDraft(arena) if base_version and offered and base_version == self.published_version else None
        self._published = None  # from here on the arena holds neither the old nor the new bytes
        arena.begin()
        for name, data in tensors:
            round_.updates[0].deadline.left_s(f"the copy of {name}")
            if draft is not None:
                await asyncio.to_thread(draft.note, name, data)
            await _copy(arena, name, data)
        cargo = Cargo(Manifest(target_version, arena.specs()), arena)
        if draft is not None and draft.is_worth_it and base_version is not None:
            cargo = await asyncio.to_thread(draft.cargo, target_version, base_version)
        return await self._with_folder(cargo, round_)

    async def _with_folder(self, cargo: Cargo, round_: Round) -> Cargo:
        """The same with its shards in files, where a server takes them from there."""
        if self.folder is None or not any(u.transport == "file" for u in round_.live):
            return cargo
        folder = UpdateFolder(self.folder)
        for shard, buffer in cargo.arena.buffers.items():
            await asyncio.to_thread(folder.write, shard, buffer)
        return Cargo(cargo.manifest, cargo.arena, folder)

    def _arena_for(self, layout: Sequence[TensorLayout], updates: Sequence[ServerUpdate]) -> Arena:
        """Chooses each target's transport and gives the arena that serves them all, the last one where it fits."""
        for u in updates:
            self._choose(u)
        shared = any(u.transport == "shm" for u in updates)
        if self._arena is not None and (self._may_be_read or not self._arena.fits(layout, shared=shared)):
            self._drop_arena()
        if self._arena is None:
            self._published = None
            self._arena = self._new_arena(layout, updates)
        return self._arena

    def _new_arena(self, layout: Sequence[TensorLayout], updates: Sequence[ServerUpdate]) -> Arena:
        for u in updates:
            self._choose(u)
        try:
            return Arena(layout, shared=any(u.transport == "shm" for u in updates))
        except MemoryError as error:
            if self.transport != "auto" or not any(u.transport == "shm" for u in updates):
                raise
            log.warning("%s; sending inline", error)
            for u in updates:
                u.transport = "inline"
            return Arena(layout, shared=False)

    def _choose(self, update: ServerUpdate) -> None:
        offered, ours = update.info.capabilities.transports, shm.namespace_id()
        visible = "shm" in offered and ours != "" and update.info.shm_namespace_id == ours
        chosen = self.transport if self.transport != "auto" else ("shm" if visible else "inline")
        if chosen == "shm" and not visible:
            raise ValueError(
                f"{update.target.url} does not see this process's shared memory (it runs on another host or in another "
                "container, or does not offer it): use transport='auto' or 'inline'"
            )
        if chosen not in offered:
            raise MissingCapability.named("transports", f"{update.target.url}: taking weights by {chosen!r}")
        update.transport, update.compression = chosen, self.compression

    @asynccontextmanager
    async def _round(
        self, targets: Sequence[PublishTarget], timeout_s: float, purpose: str, *, impatient: bool = False
    ) -> AsyncIterator[Round]:
        """One at a time. At its end what was begun and not committed is aborted, and connections are closed."""
        if not targets or len({t.url for t in targets}) != len(targets):
            raise ValueError(f"a publish needs distinct targets, got {[t.url for t in targets]}")
        async with self._one_at_a_time:
            deadline = Deadline(timeout_s, purpose)
            on_failure = "drop" if impatient else self.on_failure
            patience = AWAY_S if on_failure == "drop" and (len(targets) > 1 or impatient) else None
            round_ = Round([ServerUpdate(t, deadline, patience) for t in targets], on_failure=on_failure)
            try:
                yield round_
            finally:
                await self._end(round_)

    async def _end(self, round_: Round) -> None:
        ending = asyncio.ensure_future(round_.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # a second Ctrl-C waits too, at most 5 s: servers must not be left with an open update
            raise
        finally:
            # such a server may map the arena when it wakes: the next publish writes elsewhere
            self._may_be_read |= any(u.progress.begun and not u.progress.ended for u in round_.updates)

    def _drop_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena, self._may_be_read = None, False

    def _drop_adapters(self) -> None:
        for cargo in self._adapters.values():
            cargo.arena.close()
        self._adapters.clear()

    def close(self) -> None:
        """Gives the memory back and unlinks its shared segments."""
        self._drop_arena()
        self._drop_adapters()
        self._published = None


async def _send(round_: Round, cargo: Cargo) -> PublishReport:
    """Begin, transfer, seal, commit."""
    try:
        await round_.step("begin", lambda u: u.begin(cargo))
        await round_.step("transfer", lambda u: u.transfer(cargo))
        await round_.step("seal", lambda u: u.seal(cargo))
    finally:
        if cargo.folder is not None:
            cargo.folder.close()  # every server has its copy
    await round_.commit(cargo.manifest.policy_id)
    return PublishReport(
        target_version=cargo.manifest.target_version,
        nbytes=cargo.arena.nbytes,
        seconds=round_.seconds,
        transports={u.target.url: u.transport for u in round_.committed},
        stall_s=max(u.progress.stall_s for u in round_.committed),
        committed=tuple(u.target.url for u in round_.committed),
        failed={url: str(error) for url, error in round_.failed.items()},
        kind=cargo.manifest.kind,
    )


async def _copy(arena: Arena, name: str, data: memoryview) -> None:
    """Rollouts go on streaming meanwhile."""
    if data.nbytes < _IN_THREAD_BYTES:
        arena.write(name, data)
        await asyncio.sleep(0)
    else:
        await asyncio.to_thread(arena.write, name, data)
