"""WeightService: all-or-nothing replacement of the served weights, inline or through shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from skyrl_rollout import wire
from skyrl_rollout.errors import InvalidRequest, MissingCapability, WrongState
from skyrl_rollout.server import convert
from skyrl_rollout.server.answers import answered
from skyrl_rollout.server.parts import ServerParts
from skyrl_rollout.server.updates import CommitReport, Update, check_manifest
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.v1 import weights_pb2_grpc
from skyrl_rollout.weights.shm import namespace_id

DEFAULT_LEASE_S = 300.0
MAX_PARALLEL_SHARDS = 4
COMPRESSIONS = {pb.COMPRESSION_NONE: "none", pb.COMPRESSION_ZSTD: "zstd"}


class WeightService(weights_pb2_grpc.WeightServiceServicer):
    """The update RPCs over one `Updater`."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts

    @answered
    async def BeginUpdate(
        self, request: pb.BeginUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.BeginUpdateResponse:
        await self._parts.guard.admit(request.fence)
        update = self._checked(request)
        lease_s, limit = convert.seconds(request, "lease", DEFAULT_LEASE_S), self._parts.options.max_chunk_bytes
        update = self._parts.updater.begin(update, lease_s or DEFAULT_LEASE_S)
        return pb.BeginUpdateResponse(
            state=convert.number(update.state),
            staged=True,
            chunk_bytes=min(request.transport.inline.chunk_bytes or limit, limit),
            max_parallel_shards=MAX_PARALLEL_SHARDS,
        )

    @answered
    async def UploadChunks(
        self, requests: AsyncIterator[pb.UploadChunksRequest], context: grpc.aio.ServicerContext
    ) -> pb.UploadChunksResponse:
        answer = None
        async for m in requests:
            durable = self._parts.updater.write(m.update_id, m.shard, m.offset, m.data, m.crc32c)
            answer = pb.UploadChunksResponse(shard=m.shard, durable_offset=durable)
        if answer is None:
            raise InvalidRequest("UploadChunks carried no chunk: send at least one")
        return answer

    @answered
    async def PullUpdate(self, request: pb.PullUpdateRequest, context: grpc.aio.ServicerContext) -> None:
        await self._parts.guard.admit(request.fence)
        done = self._parts.updater.pull(request.update_id)
        # no SOURCE_RELEASED: the mapping is read until the commit, the trainer keeps its segments until then
        await context.write(pb.PullUpdateResponse(phase=pb.PullUpdateResponse.PHASE_READY, bytes_total=done))
        await context.write(
            pb.PullUpdateResponse(phase=pb.PullUpdateResponse.PHASE_PROGRESS, bytes_done=done, bytes_total=done)
        )

    @answered
    async def SealUpdate(
        self, request: pb.SealUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.SealUpdateResponse:
        await self._parts.guard.admit(request.fence)
        update = await self._parts.updater.seal(request.update_id)
        return pb.SealUpdateResponse(state=convert.number(update.state), manifest_digest=update.manifest.digest)

    @answered
    async def CommitUpdate(
        self, request: pb.CommitUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitUpdateResponse:
        mode = convert.known(request.mode, convert.MODE_NAMES, "mode", unset="keep")
        kv = convert.known(request.kv, convert.KV_NAMES, "kv", unset="recompute")
        if kv not in self._parts.engine.capabilities.kv_policies:
            raise MissingCapability.named("kv_policies", f"committing with KV policy {kv}")
        await self._parts.guard.admit(request.fence)
        report: CommitReport = await self._parts.operations.run(
            ("Commit", request.update_id),
            lambda: self._parts.updater.commit(
                request.update_id,
                expected_version=request.expected_version,
                mode=mode,
                retain_kv=kv == "retain",
                stay_paused=request.stay_paused,
            ),
            interruptible=lambda: self._parts.pauser.waits,
        )
        return pb.CommitUpdateResponse(
            weight_version=report.weight_version,
            previous_version=report.previous_version,
            frozen=report.frozen,
            aborted=report.aborted,
            stall=convert.duration(report.stall_s),
        )

    @answered
    async def AbortUpdate(
        self, request: pb.AbortUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortUpdateResponse:
        await self._parts.guard.admit(request.fence)
        return pb.AbortUpdateResponse(state=convert.number(self._parts.updater.abort(request.update_id).state))

    @answered
    async def GetUpdate(self, request: pb.GetUpdateRequest, context: grpc.aio.ServicerContext) -> pb.GetUpdateResponse:
        update = self._parts.updater.book.get(request.update_id)
        return pb.GetUpdateResponse(
            state=convert.number(update.state),
            durable_offsets=self._parts.updater.durable_offsets(request.update_id),
            weight_version=self._parts.state.weight_version,
        )

    def _checked(self, request: pb.BeginUpdateRequest) -> Update:
        """The update that the request describes, its manifest compared with the served model."""
        if not request.update_id:
            raise InvalidRequest("update_id is missing: mint a UUID for every update")
        m = request.manifest
        kind = m.WhichOneof("kind")
        if kind == "lora" or m.policy_id:
            raise MissingCapability.named("lora", "updating an adapter")
        if kind == "overwrite" or m.HasField("base_version"):
            raise MissingCapability.named("delta", "a delta update")
        if kind != "full" or m.full.naming not in ("", "hf"):
            raise InvalidRequest(
                "manifest.kind must be full with naming 'hf': tensors as in the Hugging Face checkpoint"
            )
        manifest = wire.manifest_from_pb(m)
        if manifest.target_version < 1:
            raise InvalidRequest("manifest.target_version must be at least 1: version 0 is the model as loaded")
        check_manifest(manifest, m.digest, self._parts.engine.identity.tensors)
        transport, segments = self._transport(request.transport)
        compression = convert.known(request.compression, COMPRESSIONS, "compression", unset="none")
        return Update(request.update_id, manifest, transport, compression, segments)

    def _transport(self, transport: pb.Transport) -> tuple[str, dict[int, str]]:
        kind = transport.WhichOneof("kind")
        if kind == "inline":
            return "inline", {}
        if kind in ("file", "collective"):
            name = "file" if kind == "file" else (transport.collective.backend or "nccl")
            raise MissingCapability.named("transports", f"the transport {name!r}")
        if kind != "shm":
            raise InvalidRequest("transport is missing: set inline or shm")
        here = namespace_id()
        if not here:
            raise MissingCapability.named("transports", "the transport 'shm'")
        if transport.shm.namespace_id != here:
            raise WrongState(
                f"the shared memory is of namespace {transport.shm.namespace_id!r}, this server sees {here!r}: "
                f"use the inline transport between hosts"
            )
        return "shm", {s.shard: s.name for s in transport.shm.segments}
