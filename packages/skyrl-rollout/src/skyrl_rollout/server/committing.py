"""From a manifest to new live weights: begin, take bytes, seal, commit; the old version serves until then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import google_crc32c
import zstandard

from skyrl_rollout.errors import AdapterFailed, CorruptBytes, InvalidRequest, Poisoned, VersionConflict, WrongState
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.leases import Lease
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.pausing import DEFAULT_LEASE_S, Pauser
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.staging import InlineStaging, Staging, missing_bytes
from skyrl_rollout.server.state import BASE_POLICY, FINAL, EngineState, ServerState
from skyrl_rollout.server.swapping import Swapper
from skyrl_rollout.server.updates import CommitReport, Update, UpdateBook, UpdateState

logger = logging.getLogger(__name__)


class Updater:
    """The one live update of a server, its staged bytes and its lease."""

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        runs: RunRegistry,
        pauser: Pauser,
        swapper: Swapper,
        options: ServerOptions,
    ) -> None:
        self.book = UpdateBook()
        self._engine, self._state, self._runs, self._pauser = engine, state, runs, pauser
        self._swapper, self._max_chunk_bytes = swapper, options.max_chunk_bytes
        self._staging: Staging | None = None
        self._lease = Lease(self._lease_ran_out)

    def begin(self, update: Update) -> Update:
        """Opens the update, or attaches to it, which renews its lease.

        Raises StagingFull, VersionConflict, VersionReused, UpdateIdReused, WrongState.
        """
        if self._state.state is EngineState.POISONED:
            raise Poisoned("a weight update failed half way: restart this server and publish again")
        asked, current = update, self.version_of(update)
        update, is_new = self.book.begin(update, current_version=current, serves=self._serves(update))
        if not update.is_live:
            return update
        if is_new:
            try:
                self._swapper.check(update)
                self._staging = self._swapper.stage(update)
            except BaseException:
                update.move(UpdateState.ABORTED)
                raise
        update.lease_s = asked.lease_s
        self._renew(update)
        return update

    def version_of(self, update: Update) -> int:
        """The version of the update's policy that serves now; 0 for an adapter that is not loaded."""
        return self._state.versions.get(update.manifest.policy_id, 0)

    def write(self, update_id: str, shard: int, offset: int, data: bytes, crc32c: int) -> int:
        """Takes one inline chunk and returns the shard's durable offset. Raises CorruptBytes, OffsetHole, ..."""
        update, staging = self._open(update_id, "UploadChunks")
        if not isinstance(staging, InlineStaging):
            raise WrongState(f"update {update_id} was opened for the transport {update.transport!r}: call PullUpdate")
        if len(data) > self._max_chunk_bytes:
            raise InvalidRequest(
                f"the chunk has {len(data)} bytes, at most {self._max_chunk_bytes} are taken: cut it to "
                f"BeginUpdateResponse.chunk_bytes"
            )
        if google_crc32c.value(data) != crc32c:
            raise CorruptBytes(
                f"the chunk at {offset} of shard {shard} does not have its crc32c: send it again",
                details={"durable_offset": str(staging.durable.get(shard, 0)), "shard": str(shard)},
            )
        if update.compression == "zstd":
            data = _decompressed(data, self._max_chunk_bytes)
        return staging.write(shard, offset, data)

    async def pull(self, update_id: str) -> AsyncGenerator[tuple[int, int]]:
        """Fetches the bytes, or joins the group of a collective update; (bytes done, bytes of all), first when the
        source is open. A collective that does not come about, its call cancelled included, is aborted."""
        update, staging = self._open(update_id, "PullUpdate")
        total = sum(update.manifest.shard_nbytes().values()) if update.is_staged else 0
        try:
            async with aclosing(staging.pull()) as steps:
                async for _ in steps:
                    yield sum(staging.durable.values()), total
                    self._open(update_id, "PullUpdate")  # a copy that goes on keeps its lease
        except BaseException:
            if not update.is_staged and update.state is UpdateState.OPEN:
                logger.warning("update %s: the group did not come about, it is aborted", update_id)
                self.abort(update_id)
            raise
        self._open(update_id, "PullUpdate")
        yield sum(staging.durable.values()), total

    def releases_source(self, update_id: str) -> bool:
        """Whether the trainer's bytes may go once all are pulled. False once the update has ended."""
        live = self.book.live
        return (
            live is not None and live.update_id == update_id and bool(self._staging and self._staging.releases_source)
        )

    async def seal(self, update_id: str) -> Update:
        """Checks every digest. Raises CorruptBytes, and then the shards named are to be sent again."""
        update = self.book.get(update_id)
        if update.state in (UpdateState.SEALED, UpdateState.COMMITTING, UpdateState.COMMITTED):
            return update
        update, staging = self._open(update_id, "SealUpdate")
        if update.is_staged and (missing := missing_bytes(staging, update.manifest)):
            raise WrongState(f"update {update_id} is incomplete: send or pull the rest first, missing is {missing}")
        try:
            await asyncio.to_thread(self._swapper.verify, update, staging)
        except CorruptBytes as error:
            for shard in error.details["shards"].split(","):
                staging.discard(int(shard))
            raise
        except KeyError:
            update.need(UpdateState.OPEN, what="SealUpdate")  # aborted meanwhile: its memory is gone
            raise
        if update.state is not UpdateState.SEALED:  # another call may have sealed it meanwhile
            update.move(UpdateState.SEALED)
            self._renew(update)
        return update

    async def commit(
        self, update_id: str, *, expected_version: int, mode: str, retain_kv: bool, stay_paused: bool
    ) -> CommitReport:
        """Pause, swap, re-key the cache and resume as one step; a second call gets the first one's report.

        Raises VersionConflict, WrongState, Overloaded, AdapterFailed, or Poisoned when the engine is unusable
        afterwards.
        """
        update = self.book.get(update_id)
        async with self._pauser.lock:
            if update.report is not None:
                return update.report
            update.need(UpdateState.SEALED, what="CommitUpdate")
            await self._check(update, expected_version)
            held = self._pauser.is_held
            # KV of other policies stays right; with new weights of the base there are no others
            policy_id = update.manifest.policy_id
            clear = not retain_kv and (policy_id == BASE_POLICY or bool(self._runs.ids_of(policy_id)))
            aborted = await (self._stop_again if held or self._state.resting else self._stop)(mode, clear)
            try:
                update.need(UpdateState.SEALED, what="CommitUpdate")  # not aborted while running requests finished
                report = await self._swap(update, aborted, retain_kv)
            except BaseException:
                await self._go_on(held=held)
                raise
            if stay_paused and not held and not self._state.resting:
                self._pauser.hold(update_id, DEFAULT_LEASE_S)
            else:
                await self._go_on(held=held)
            return report

    def abort(self, update_id: str) -> Update:
        """Drops an open or sealed update and its bytes. Raises WrongState once it is being committed."""
        update = self.book.get(update_id)
        if update.state in (UpdateState.COMMITTING, UpdateState.COMMITTED):
            raise WrongState(f"update {update_id} is {update.state.name}: publish other weights as a later version")
        if update.is_live:
            update.move(UpdateState.ABORTED)
            self._free()
            self._swapper.release_memory()
        return update

    def abort_live(self) -> None:
        """Drops the open or sealed update, if any, because its owner is gone."""
        live = self.book.live
        if live is not None and live.state is not UpdateState.COMMITTING:
            self.abort(live.update_id)

    def durable_offsets(self, update_id: str) -> dict[int, int]:
        live = self.book.live
        return dict(self._staging.durable) if live and live.update_id == update_id and self._staging else {}

    async def _go_on(self, *, held: bool) -> None:
        if self._state.state in FINAL:
            return
        if held:
            self._state.move(EngineState.PAUSED, rejects_new_work=self._pauser.rejects_new_work)
        else:
            await self._pauser.start()

    async def _stop(self, mode: str, clear_cache: bool) -> int:
        return await self._pauser.stop(mode, clear_cache=clear_cache)

    async def _stop_again(self, mode: str, clear_cache: bool) -> int:
        """The engine is paused already: what the commit's own mode and KV policy still ask for."""
        self._pauser.stopped_at = time.monotonic()
        if self._state.resting:
            return 0  # nothing runs, and there is no KV
        if mode == "wait" and self._runs.running:
            raise WrongState(
                "requests are frozen by a pause and cannot finish: Resume first, or commit with KEEP or ABORT"
            )
        running = self._runs.running
        await self._engine.pause(mode, clear_cache=clear_cache)
        return running if mode == "abort" else 0

    async def _swap(self, update: Update, aborted: int, retain_kv: bool) -> CommitReport:
        assert self._staging is not None
        self._state.move(EngineState.COMMITTING)
        update.move(UpdateState.COMMITTING)
        self._lease.release()
        policy_id, target = update.manifest.policy_id, update.manifest.target_version
        previous, frozen = self.version_of(update), 0 if aborted else self._runs.running
        try:
            stopped = await self._runs.cut(target, policy_id, retain_kv=retain_kv)
            if await self._swapper.swap(update, self._staging):
                self._staging = None
        except BaseException as error:
            update.move(UpdateState.FAILED)
            logger.exception("update %s failed while the live weights were replaced", update.update_id)
            raise await self._failed(update, error) from error
        finally:
            self._free()
        stall_s = time.monotonic() - self._pauser.stopped_at
        report = CommitReport(target, previous, frozen - stopped, aborted + stopped, stall_s)
        self.book.committed(update, report)
        logger.info(
            "version %d of policy %r committed: %d frozen, %d ended, %.3f s stalled",
            target, policy_id, report.frozen, report.aborted, stall_s,
        )  # fmt: skip
        return report

    async def _failed(self, update: Update, error: BaseException) -> AdapterFailed | Poisoned:
        policy_id, target = update.manifest.policy_id, update.manifest.target_version
        said = str(error) or type(error).__name__
        if policy_id != BASE_POLICY:
            await self._runs.abort(self._runs.ids_of(policy_id))
            return AdapterFailed(
                f"the engine failed while taking version {target} of policy {policy_id!r}: {said}; the adapter is "
                f"dropped, publish it again as a later version"
            )
        self._state.move(EngineState.POISONED)
        self._runs.drop_all()
        return Poisoned(f"the engine failed while taking version {target}: {said}; restart this server")

    def _open(self, update_id: str, what: str) -> tuple[Update, Staging]:
        update = self.book.get(update_id)
        update.need(UpdateState.OPEN, what=what)
        assert self._staging is not None
        self._renew(update)
        return update, self._staging

    async def _check(self, update: Update, expected: int) -> None:
        """What a commit needs before the engine stops."""
        current = self.version_of(update)
        if expected != current:
            raise VersionConflict(
                f"expected_version is {expected}, version {current} is committed: another trainer published meanwhile",
                details={"current_version": str(current)},
            )
        if "weights" in self._state.asleep:
            raise WrongState("the server is ASLEEP and has no room for weights: call WakeUp with weights first")
        if update.manifest.policy_id != BASE_POLICY:
            if self._state.resting:
                raise WrongState(f"the server is {self._state.resting.name}: it takes adapters when it serves again")
            await self._swapper.adapters.make_room(update.manifest.policy_id)

    def _serves(self, update: Update) -> bool:
        policy_id = update.manifest.policy_id
        return not self._state.weights_lost if policy_id == BASE_POLICY else policy_id in self._state.versions

    def _renew(self, update: Update) -> None:
        self._lease.renew(update.lease_s)

    def _free(self) -> None:
        self._lease.release()
        staging, self._staging = self._staging, None
        if staging is not None:
            self._swapper.close(staging)

    def _lease_ran_out(self) -> None:
        logger.warning("the lease of the open update ran out: it is aborted")
        self.abort_live()


def _decompressed(data: bytes, limit: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            out = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the chunk is not a zstd frame: {error}") from error
    if len(out) > limit:
        raise InvalidRequest(f"the chunk decompresses to more than {limit} bytes, the limit of a chunk")
    return out
