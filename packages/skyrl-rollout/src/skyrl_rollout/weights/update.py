"""One weight update on one server, step by step: begin, transfer, seal, commit, or abort."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from skyrl_rollout import wire
from skyrl_rollout.calls import Backoff, Caller, Deadline
from skyrl_rollout.channel import open_channel
from skyrl_rollout.errors import (
    Cancelled,
    CorruptBytes,
    DeadlineExceeded,
    ModelMismatch,
    OffsetHole,
    RolloutError,
    ServerUnreachable,
    VersionConflict,
    WrongState,
    from_rpc_error,
)
from skyrl_rollout.protocol import PROTOCOL_MINOR, build, check_server
from skyrl_rollout.security import Credentials
from skyrl_rollout.server_info import ServerInfo, info_from_pb
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc, weights_pb2, weights_pb2_grpc
from skyrl_rollout.weights import inline
from skyrl_rollout.weights.arena import Arena
from skyrl_rollout.weights.file import UpdateFolder
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, differences

log = logging.getLogger(__name__)

LEASE_MARGIN_S = 30.0
LAST_WORD_S = 5.0  # for an abort, or for asking how a commit ended, when the time is already up
_RESENDS = 3
_SHOWN_DIFFERENCES = 20


@dataclass(frozen=True)
class PublishTarget:
    """A server to publish to, and the epoch that its AcquireControl answered (on N replicas: the highest of all).

    retain_kv: running samples keep the KV that they have, where the server can do that; else they recompute it under
    the new weights.
    """

    url: str
    trainer_epoch: int
    credentials: Credentials | None = None
    retain_kv: bool = False


@dataclass(frozen=True)
class Cargo:
    """What is sent to every server: the manifest, its bytes, and the folder that holds them for "file"."""

    manifest: Manifest
    arena: Arena
    folder: UpdateFolder | None = None


@dataclass
class Progress:
    """What is known of the update on the server: whether it may still read the arena decides about reuse."""

    begun: bool = False
    ended: bool = False  # committed, or known to be aborted
    committed: bool = False
    stall_s: float = 0.0


@dataclass
class ServerUpdate:
    """Owns a channel for calls and, inline, one per shard for bytes. Every step raises the server's typed error.

    away_s: how long the server may be away before a step fails (None: until the deadline).
    """

    target: PublishTarget
    deadline: Deadline
    away_s: float | None = None
    update_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    progress: Progress = field(default_factory=Progress)
    transport: str = ""
    compression: str = "none"

    def __post_init__(self) -> None:
        credentials = self.target.credentials or Credentials.from_environment()
        self._channel = open_channel(self.target.url, credentials)
        self._engine = control_pb2_grpc.EngineServiceStub(self._channel)
        self._weights = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._call = Caller(self.target.url, credentials, away_s=self.away_s)
        self.info: ServerInfo

    def _fence(self) -> control_pb2.Fence:
        return control_pb2.Fence(trainer_epoch=self.target.trainer_epoch, op_id=str(uuid.uuid4()))

    async def look(self) -> None:
        """Fetches who answers there, its tensors and its committed version."""
        request = control_pb2.GetServerInfoRequest(client_minor=PROTOCOL_MINOR, client_build=build())
        what = "GetServerInfo"
        left = self.deadline.left_s(what)
        left = left if self.away_s is None else min(left, self.away_s)
        pb = await self._call(self._engine.GetServerInfo, request, what=what, timeout_s=left)
        check_server(pb.protocol_minor, pb.server_build, self.target.url)
        self.info = info_from_pb(pb, self.target.url)

    def check(self, layout: Sequence[TensorLayout], version: int, *, may_equal: bool = False) -> None:
        """Raises ModelMismatch, naming the tensors that differ, VersionConflict where the server is as far."""
        info = self.info
        wrong = differences(layout, info.model.tensors)
        if wrong:
            more = f"\n  and {len(wrong) - _SHOWN_DIFFERENCES} more" if len(wrong) > _SHOWN_DIFFERENCES else ""
            listed = "".join(f"\n  {line}" for line in wrong[:_SHOWN_DIFFERENCES])
            raise ModelMismatch(
                f"{info.url} serves another model ({info.model.name}): {len(wrong)} tensors differ{listed}{more}\n"
                "start the server with the trainer's model, or correct the url",
                violations=[(line.partition(": ")[0], line.partition(": ")[2]) for line in wrong],
            )
        if version < info.weight_version + (not may_equal):
            raise VersionConflict(
                f"{info.url} serves version {info.weight_version}, and versions only grow: publish above it, "
                f"not as {version}",
                details={"current_version": str(info.weight_version)},
            )

    async def begin(self, cargo: Cargo) -> None:
        """Offers the manifest; the server checks it and takes memory, or refuses. Content that is committed there
        already needs nothing more."""
        left = self.deadline.left_s("BeginUpdate")
        request = weights_pb2.BeginUpdateRequest(
            fence=self._fence(),
            update_id=self.update_id,
            manifest=wire.manifest_to_pb(cargo.manifest),
            transport=self._transport_pb(cargo),
            compression=inline.COMPRESSIONS[self.compression if self.transport == "inline" else "none"],
        )
        request.lease.FromNanoseconds(int((left + LEASE_MARGIN_S) * 1e9))
        self.progress.begun = True  # before the call: a lost reply leaves an open update behind
        try:
            reply = await self._call(self._weights.BeginUpdate, request, what="BeginUpdate", timeout_s=left)
        except WrongState as error:
            if not await self._clear(error):
                raise
            reply = await self._call(self._weights.BeginUpdate, request, what="BeginUpdate", timeout_s=left)
        if reply.state == weights_pb2.UPDATE_STATE_COMMITTED:
            self.progress.committed = self.progress.ended = True
        limits = (reply.chunk_bytes, self.info.limits.max_chunk_bytes)
        self._chunk_bytes = inline.chunk_bytes(*limits, compression=self.compression)
        self._parallel = asyncio.Semaphore(max(1, reply.max_parallel_shards))

    async def _clear(self, refusal: WrongState) -> bool:
        """Aborts the update that is in the way. The epoch says that it is this trainer's own: a connection that broke
        kept its abort from arriving."""
        open_id = refusal.details.get("update_id")
        if not open_id:
            return False
        log.warning("aborting update %s, left open at %s by an earlier publish", open_id, self.target.url)
        request = weights_pb2.AbortUpdateRequest(fence=self._fence(), update_id=open_id)
        left = self.deadline.left_s("AbortUpdate")
        await self._call(self._weights.AbortUpdate, request, what="AbortUpdate", timeout_s=left)
        return True

    def _transport_pb(self, cargo: Cargo) -> weights_pb2.Transport:
        if self.transport == "inline":
            size = inline.chunk_bytes(self.info.limits.max_chunk_bytes)
            return weights_pb2.Transport(inline=weights_pb2.InlineTransport(chunk_bytes=size))
        if self.transport == "file":
            assert cargo.folder is not None
            return weights_pb2.Transport(file=weights_pb2.FileTransport(uri=cargo.folder.uri))
        segments = [
            weights_pb2.ShmSegment(shard=shard, name=segment.name, nbytes=cargo.arena.shard_nbytes[shard])
            for shard, segment in cargo.arena.segments.items()
        ]
        shm = weights_pb2.ShmTransport(namespace_id=self.info.shm_namespace_id, segments=segments)
        return weights_pb2.Transport(shm=shm)

    async def transfer(self, cargo: Cargo) -> None:
        """Moves the bytes, starting again where the server stopped when a connection breaks or a chunk is damaged."""
        once = self._upload if self.transport == "inline" else self._pull
        backoff, resends = Backoff(), 0
        while True:
            try:
                return await once(cargo.arena)
            except grpc.aio.AioRpcError as raised:
                error = from_rpc_error(raised, endpoint=self.target.url)
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.deadline.left_s(f"the {self.transport} transfer to {self.target.url}")
            unclear = isinstance(error, CorruptBytes | OffsetHole) or inline.LOST_STATUS in error.message
            again = unclear and self.transport == "inline"
            resends += again
            if not error.retried and not (again and resends <= _RESENDS):
                raise error
            log.warning("weights for %s: %s; going on where it stopped", self.target.url, error)
            wait = backoff.next_s(error.retry_after_s)
            await asyncio.sleep(min(wait, self.deadline.left_s(f"the {self.transport} transfer ({error})")))
            await self._ask()  # one that stays away, or came back without the update, ends it here

    async def _upload(self, arena: Arena) -> None:
        """The shards side by side, as many as the server takes; the first error ends the others."""
        durable = (await self._ask()).durable_offsets
        missing = {n: durable.get(n, 0) for n, nbytes in arena.shard_nbytes.items() if durable.get(n, 0) < nbytes}
        shards = [asyncio.ensure_future(self._upload_shard(arena, n, start)) for n, start in missing.items()]
        try:
            await asyncio.gather(*shards)
        finally:
            for shard in shards:
                shard.cancel()
            await asyncio.gather(*shards, return_exceptions=True)

    async def _upload_shard(self, arena: Arena, shard: int, start: int) -> None:
        async with self._parallel:
            channel = open_channel(self.target.url, self.target.credentials)
            try:
                reply = await inline.upload_call(channel)(
                    inline.messages(
                        arena, self.update_id, shard, start, size=self._chunk_bytes, compression=self.compression
                    ),
                    timeout=self.deadline.left_s("UploadChunks"),
                    metadata=self._call.metadata,
                )
            finally:
                await channel.close()
        nbytes = arena.shard_nbytes[shard]
        if reply.durable_offset != nbytes:
            raise CorruptBytes(
                f"{self.target.url} holds {reply.durable_offset} of the {nbytes} bytes of shard {shard} after the last"
            )

    async def _pull(self, arena: Arena) -> None:
        call = self._weights.PullUpdate(
            weights_pb2.PullUpdateRequest(fence=self._fence(), update_id=self.update_id),
            timeout=self.deadline.left_s("PullUpdate"),
            metadata=self._call.metadata,
        )
        async for _ in call:
            pass

    async def seal(self, cargo: Cargo) -> None:
        """The server verifies every digest; bytes damaged on their way are sent once more. Raises CorruptBytes."""
        request = weights_pb2.SealUpdateRequest(fence=self._fence(), update_id=self.update_id)
        what = "SealUpdate"
        try:
            reply = await self._call(self._weights.SealUpdate, request, what=what, timeout_s=self.deadline.left_s(what))
        except CorruptBytes as error:
            if self.transport != "inline":
                raise
            log.warning("%s: %s; sending again", self.target.url, error)
            await self.transfer(cargo)
            reply = await self._call(self._weights.SealUpdate, request, what=what, timeout_s=self.deadline.left_s(what))
        if reply.state != weights_pb2.UPDATE_STATE_SEALED:
            raise RolloutError(f"{self.target.url} answered SealUpdate with state {_state_name(reply.state)}")

    def version_of(self, policy_id: str) -> int:
        """The version of a policy that the server reported; 0 where it has none."""
        return self.info.weight_versions.get(policy_id, 0)

    async def commit(self, policy_id: str = "") -> None:
        """Switches the served weights of a policy. A lost reply is asked for again; committing twice moves the version
        once."""
        retains = self.target.retain_kv and "retain" in self.info.capabilities.kv_policies
        request = weights_pb2.CommitUpdateRequest(
            fence=self._fence(),
            update_id=self.update_id,
            expected_version=self.version_of(policy_id),
            kv=wire.KV_POLICIES["retain" if retains else "recompute"],
        )
        try:
            left = self.deadline.left_s("CommitUpdate")
            reply = await self._call(self._weights.CommitUpdate, request, what="CommitUpdate", timeout_s=left)
        except (DeadlineExceeded, ServerUnreachable, Cancelled) as error:
            state = (await self._ask(LAST_WORD_S)).state
            if state != weights_pb2.UPDATE_STATE_COMMITTED:
                error.message += f" (the update is {_state_name(state)} there)"
                raise
        else:
            self.progress.stall_s = reply.stall.ToNanoseconds() / 1e9
        self.progress.committed = self.progress.ended = True

    async def abort(self) -> None:
        """Drops what was begun, within 5 s. A server that cannot be reached drops it when the lease runs out."""
        if not self.progress.begun or self.progress.ended:
            return
        request = weights_pb2.AbortUpdateRequest(fence=self._fence(), update_id=self.update_id)
        try:
            await self._call(self._weights.AbortUpdate, request, what="AbortUpdate", timeout_s=LAST_WORD_S)
        except RolloutError as error:
            log.warning("update %s was not aborted at %s: %s", self.update_id, self.target.url, error)
        else:
            self.progress.ended = True

    async def _ask(self, timeout_s: float | None = None) -> weights_pb2.GetUpdateResponse:
        request, what = weights_pb2.GetUpdateRequest(update_id=self.update_id), "GetUpdate"
        timeout_s = self.deadline.left_s(what) if timeout_s is None else timeout_s
        return await self._call(self._weights.GetUpdate, request, what=what, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._channel.close()


def _state_name(state: int) -> str:
    return weights_pb2.UpdateState.Name(state).removeprefix("UPDATE_STATE_").lower()
