"""From a manifest to new live weights: begin, take bytes, seal, commit; the old version serves until then."""

from __future__ import annotations

import asyncio
import logging
import time

import google_crc32c
import zstandard

from skyrl_rollout.errors import CorruptBytes, InvalidRequest, Poisoned, VersionConflict, WrongState
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.leases import Lease
from skyrl_rollout.server.pausing import DEFAULT_LEASE_S, Pauser
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.staging import InlineStaging, ShmStaging, Staging, missing_bytes, tensors, verify
from skyrl_rollout.server.state import EngineState, ServerState
from skyrl_rollout.server.updates import CommitReport, Update, UpdateBook, UpdateState

logger = logging.getLogger(__name__)


class Updater:
    """The one live update of a server, its staged bytes and its lease."""

    def __init__(
        self, engine: Engine, state: ServerState, runs: RunRegistry, pauser: Pauser, *, max_chunk_bytes: int
    ) -> None:
        self.book = UpdateBook()
        self._engine, self._state, self._runs, self._pauser = engine, state, runs, pauser
        self._staging: Staging | None = None
        self._lease = Lease(self._lease_ran_out)
        self._lease_s = 0.0
        self._max_chunk_bytes = max_chunk_bytes

    def begin(self, update: Update, lease_s: float) -> Update:
        """Opens the update, or attaches to it. Raises StagingFull, VersionConflict, UpdateIdReused, WrongState."""
        if self._state.state is EngineState.POISONED:
            raise Poisoned("a weight update failed half way: restart this server and publish again")
        update, is_new = self.book.begin(update, current_version=self._state.weight_version)
        if not update.is_live:
            return update
        if is_new:
            try:
                self._staging = _stage(update)
            except BaseException:
                update.move(UpdateState.ABORTED)
                raise
        self._lease_s = lease_s
        self._renew()
        return update

    def write(self, update_id: str, shard: int, offset: int, data: bytes, crc32c: int) -> int:
        """Takes one inline chunk and returns the shard's durable offset. Raises CorruptBytes, OffsetHole, ..."""
        staging = self._open(update_id, "UploadChunks")
        if not isinstance(staging, InlineStaging):
            raise WrongState(f"update {update_id} was opened for shared memory: call PullUpdate")
        if len(data) > self._max_chunk_bytes:
            raise InvalidRequest(f"the chunk has {len(data)} bytes, the limit is {self._max_chunk_bytes}")
        if google_crc32c.value(data) != crc32c:
            raise CorruptBytes(
                f"the chunk at {offset} of shard {shard} does not have its crc32c: send it again",
                details={"durable_offset": str(staging.durable.get(shard, 0)), "shard": str(shard)},
            )
        if self.book.get(update_id).compression == "zstd":
            data = _decompressed(data, self._max_chunk_bytes)
        return staging.write(shard, offset, data)

    def pull(self, update_id: str) -> int:
        """Maps the trainer's shared memory and returns the bytes that are there."""
        staging = self._open(update_id, "PullUpdate")
        if not isinstance(staging, ShmStaging):
            raise WrongState(f"update {update_id} was opened for inline bytes: call UploadChunks")
        staging.pull()
        return sum(staging.durable.values())

    async def seal(self, update_id: str) -> Update:
        """Checks every digest. Raises CorruptBytes, and then the shards named are to be sent again."""
        update = self.book.get(update_id)
        if update.state in (UpdateState.SEALED, UpdateState.COMMITTING, UpdateState.COMMITTED):
            return update
        staging = self._open(update_id, "SealUpdate")
        if missing := missing_bytes(staging, update.manifest):
            raise WrongState(f"update {update_id} is incomplete: bytes missing by shard: {missing}")
        try:
            await asyncio.to_thread(verify, staging, update.manifest)
        except CorruptBytes as error:
            for shard in error.details["shards"].split(","):
                staging.discard(int(shard))
            raise
        except KeyError:
            update.need(UpdateState.OPEN, what="SealUpdate")  # aborted meanwhile: its memory is gone
            raise
        self._sealed(update)
        return update

    async def commit(
        self, update_id: str, *, expected_version: int, mode: str, retain_kv: bool, stay_paused: bool
    ) -> CommitReport:
        """Pause, swap, re-key the cache and resume as one step; a second call gets the first one's report.

        Raises VersionConflict, WrongState, or Poisoned when the engine is unusable afterwards.
        """
        update = self.book.get(update_id)
        async with self._pauser.lock:
            if update.report is not None:
                return update.report
            update.need(UpdateState.SEALED, what="CommitUpdate")
            self._expect(expected_version)
            held = self._pauser.is_held
            aborted = await (self._stop_again if held else self._stop)(mode, retain_kv)
            if update.state is not UpdateState.SEALED:  # aborted while running requests finished
                if not held:
                    await self._pauser.start()
                update.need(UpdateState.SEALED, what="CommitUpdate")
            report = await self._swap(update, aborted, retain_kv)
            if stay_paused and not held:
                self._pauser.hold(update_id, DEFAULT_LEASE_S)
            elif held:
                self._state.move(EngineState.PAUSED, rejects_new_work=self._pauser.rejects_new_work)
            else:
                await self._pauser.start()
            return report

    def abort(self, update_id: str) -> Update:
        """Drops an open or sealed update and its bytes. Raises WrongState once it is being committed."""
        update = self.book.get(update_id)
        if update.state in (UpdateState.COMMITTING, UpdateState.COMMITTED):
            raise WrongState(f"update {update_id} is {update.state.name}: publish other weights as a later version")
        if update.is_live:
            update.move(UpdateState.ABORTED)
            self._free()
        return update

    def abort_live(self) -> None:
        """Drops the open or sealed update, if any, because its owner is gone."""
        live = self.book.live
        if live is not None and live.state is not UpdateState.COMMITTING:
            self.abort(live.update_id)

    def durable_offsets(self, update_id: str) -> dict[int, int]:
        live = self.book.live
        return dict(self._staging.durable) if live and live.update_id == update_id and self._staging else {}

    async def _stop(self, mode: str, retain_kv: bool) -> int:
        return await self._pauser.stop(mode, clear_cache=not retain_kv)

    async def _stop_again(self, mode: str, retain_kv: bool) -> int:
        """The engine is paused already: what the commit's own mode and KV policy still ask for."""
        if mode == "wait" and self._runs.running:
            raise WrongState(
                "requests are frozen by a pause and cannot finish: Resume first, or commit with KEEP or ABORT"
            )
        running = self._runs.running
        self._pauser.stopped_at = time.monotonic()
        await self._engine.pause(mode, clear_cache=not retain_kv)
        return running if mode == "abort" else 0

    async def _swap(self, update: Update, aborted: int, retain_kv: bool) -> CommitReport:
        assert self._staging is not None
        self._state.move(EngineState.COMMITTING)
        update.move(UpdateState.COMMITTING)
        self._lease.release()
        previous, target = self._state.weight_version, update.manifest.target_version
        frozen = 0 if aborted else self._runs.running
        try:
            stopped = await self._runs.cut(target, retain_kv=retain_kv)
            await self._engine.load_weights(tensors(self._staging, update.manifest))
        except BaseException as error:
            update.move(UpdateState.FAILED)
            self._state.move(EngineState.POISONED)
            self._runs.drop_all()
            logger.exception("update %s failed while the live weights were replaced", update.update_id)
            raise Poisoned(f"the engine failed while taking version {target}: {error}; restart this server") from error
        finally:
            self._free()
        stall_s = time.monotonic() - self._pauser.stopped_at
        report = CommitReport(target, previous, frozen - stopped, aborted + stopped, stall_s)
        self.book.committed(update, report)
        self._state.committed(target)
        logger.info("version %d committed: %d frozen, %d ended, %.3f s stalled", target, frozen, aborted, stall_s)
        return report

    def _open(self, update_id: str, what: str) -> Staging:
        update = self.book.get(update_id)
        update.need(UpdateState.OPEN, what=what)
        assert self._staging is not None
        self._renew()
        return self._staging

    def _sealed(self, update: Update) -> None:
        if update.state is not UpdateState.SEALED:  # another call may have sealed it meanwhile
            update.move(UpdateState.SEALED)
            self._renew()

    def _expect(self, version: int) -> None:
        current = self._state.weight_version
        if version != current:
            raise VersionConflict(
                f"expected_version is {version}, version {current} is committed: another trainer published meanwhile",
                details={"current_version": str(current)},
            )

    def _renew(self) -> None:
        self._lease.renew(self._lease_s)

    def _free(self) -> None:
        self._lease.release()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def _lease_ran_out(self) -> None:
        logger.warning("the lease of the open update ran out: it is aborted")
        self.abort_live()


def _stage(update: Update) -> Staging:
    if update.transport == "inline":
        return InlineStaging(update.manifest)
    if update.transport == "shm":
        return ShmStaging(update.manifest, update.segments)
    raise InvalidRequest(f"transport {update.transport!r} is not one of inline, shm")


def _decompressed(data: bytes, limit: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            out = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the chunk is not a zstd frame: {error}") from error
    if len(out) > limit:
        raise InvalidRequest(f"the chunk decompresses to more than {limit} bytes, the limit of a chunk")
    return out
