"""One weight update on one server, step by step: begin, transfer, seal, commit, or abort."""

from __future__ import annotations

import asyncio
import logging
import uuid
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
    OffsetHole,
    RolloutError,
    ServerUnreachable,
    WrongState,
    from_rpc_error,
)
from skyrl_rollout.protocol import PROTOCOL_MINOR, build, check_server
from skyrl_rollout.security import ANONYMOUS, Credentials
from skyrl_rollout.server_info import ServerInfo, info_from_pb
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc, weights_pb2, weights_pb2_grpc
from skyrl_rollout.weights import inline
from skyrl_rollout.weights.arena import Arena
from skyrl_rollout.weights.manifest import Manifest

log = logging.getLogger(__name__)

LEASE_MARGIN_S = 30.0
LAST_WORD_S = 5.0  # for an abort, or for asking how a commit ended, when the time is already up
_RESENDS = 3


@dataclass(frozen=True)
class PublishTarget:
    """A server to publish to, and the epoch that its AcquireControl answered (on N replicas: the highest of all)."""

    url: str
    trainer_epoch: int
    credentials: Credentials | None = None


@dataclass
class Progress:
    """What is known of the update on the server: whether it may still read the arena decides about reuse."""

    begun: bool = False
    ended: bool = False  # committed, or known to be aborted
    committed: bool = False
    stall_s: float = 0.0


@dataclass
class ServerUpdate:
    """Owns a channel for calls and, inline, one for bytes. Every step raises the server's typed error."""

    target: PublishTarget
    deadline: Deadline
    update_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    progress: Progress = field(default_factory=Progress)
    transport: str = ""

    def __post_init__(self) -> None:
        credentials = self.target.credentials or ANONYMOUS
        self._channel = open_channel(self.target.url, credentials)
        self._engine = control_pb2_grpc.EngineServiceStub(self._channel)
        self._weights = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._call = Caller(self.target.url, credentials.metadata())
        self.info: ServerInfo

    def _fence(self) -> control_pb2.Fence:
        return control_pb2.Fence(trainer_epoch=self.target.trainer_epoch, op_id=str(uuid.uuid4()))

    async def look(self) -> None:
        """Fetches who answers there, its tensors and its committed version."""
        request = control_pb2.GetServerInfoRequest(client_minor=PROTOCOL_MINOR, client_build=build())
        what = "GetServerInfo"
        pb = await self._call(self._engine.GetServerInfo, request, what=what, timeout_s=self.deadline.left_s(what))
        check_server(pb.protocol_minor, pb.server_build, self.target.url)
        self.info = info_from_pb(pb, self.target.url)

    async def begin(self, manifest: Manifest, arena: Arena) -> None:
        """Offers the manifest; the server checks it and takes memory, or refuses."""
        left = self.deadline.left_s("BeginUpdate")
        request = weights_pb2.BeginUpdateRequest(
            fence=self._fence(),
            update_id=self.update_id,
            manifest=wire.manifest_to_pb(manifest),
            transport=self._transport_pb(arena),
            compression=weights_pb2.COMPRESSION_NONE,
        )
        request.lease.FromNanoseconds(int((left + LEASE_MARGIN_S) * 1e9))
        self.progress.begun = True  # before the call: a lost reply leaves an open update behind
        try:
            reply = await self._call(self._weights.BeginUpdate, request, what="BeginUpdate", timeout_s=left)
        except WrongState as error:
            if not await self._clear(error):
                raise
            reply = await self._call(self._weights.BeginUpdate, request, what="BeginUpdate", timeout_s=left)
        self._chunk_bytes = inline.chunk_bytes(reply.chunk_bytes, self.info.limits.max_chunk_bytes)

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

    def _transport_pb(self, arena: Arena) -> weights_pb2.Transport:
        if self.transport == "inline":
            size = inline.chunk_bytes(self.info.limits.max_chunk_bytes)
            return weights_pb2.Transport(inline=weights_pb2.InlineTransport(chunk_bytes=size))
        assert arena.segment is not None
        segment = weights_pb2.ShmSegment(shard=0, name=arena.segment.name, nbytes=arena.nbytes)
        shm = weights_pb2.ShmTransport(namespace_id=self.info.shm_namespace_id, segments=[segment])
        return weights_pb2.Transport(shm=shm)

    async def transfer(self, arena: Arena) -> None:
        """Moves the bytes, starting again where the server stopped when a connection breaks or a chunk is damaged."""
        once = self._upload if self.transport == "inline" else self._pull
        backoff, resends = Backoff(), 0
        while True:
            try:
                return await once(arena)
            except grpc.aio.AioRpcError as raised:
                error = from_rpc_error(raised, endpoint=self.target.url)
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.deadline.left_s(f"the {self.transport} transfer to {self.target.url}")
            damaged = isinstance(error, CorruptBytes | OffsetHole) and self.transport == "inline"
            resends += damaged
            if not error.retried and not (damaged and resends <= _RESENDS):
                raise error
            log.warning("weights for %s: %s; going on where it stopped", self.target.url, error)
            wait = backoff.next_s(error.retry_after_s)
            await asyncio.sleep(min(wait, self.deadline.left_s(f"the {self.transport} transfer ({error})")))

    async def _upload(self, arena: Arena) -> None:
        start = (await self._ask()).durable_offsets.get(0, 0)
        if start >= arena.nbytes:
            return  # all had arrived when the connection broke
        channel = open_channel(self.target.url, self.target.credentials)
        try:
            upload = weights_pb2_grpc.WeightServiceStub(channel).UploadChunks
            reply = await upload(
                inline.requests(arena, self.update_id, start, self._chunk_bytes),
                timeout=self.deadline.left_s("UploadChunks"),
                metadata=self._call.metadata,
            )
        finally:
            await channel.close()
        if reply.durable_offset != arena.nbytes:
            raise CorruptBytes(f"{self.target.url} holds {reply.durable_offset} of {arena.nbytes} bytes after the last")

    async def _pull(self, arena: Arena) -> None:
        call = self._weights.PullUpdate(
            weights_pb2.PullUpdateRequest(fence=self._fence(), update_id=self.update_id),
            timeout=self.deadline.left_s("PullUpdate"),
            metadata=self._call.metadata,
        )
        async for _ in call:
            pass

    async def seal(self, arena: Arena) -> None:
        """The server verifies every digest; bytes damaged on their way are sent once more. Raises CorruptBytes."""
        request = weights_pb2.SealUpdateRequest(fence=self._fence(), update_id=self.update_id)
        what = "SealUpdate"
        try:
            reply = await self._call(self._weights.SealUpdate, request, what=what, timeout_s=self.deadline.left_s(what))
        except CorruptBytes as error:
            if self.transport != "inline":
                raise
            log.warning("%s: %s; sending again", self.target.url, error)
            await self.transfer(arena)
            reply = await self._call(self._weights.SealUpdate, request, what=what, timeout_s=self.deadline.left_s(what))
        if reply.state != weights_pb2.UPDATE_STATE_SEALED:
            raise RolloutError(f"{self.target.url} answered SealUpdate with state {_state_name(reply.state)}")

    async def commit(self) -> None:
        """Switches the served weights. A lost reply is asked for again; committing twice moves the version once."""
        request = weights_pb2.CommitUpdateRequest(
            fence=self._fence(), update_id=self.update_id, expected_version=self.info.weight_version
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
