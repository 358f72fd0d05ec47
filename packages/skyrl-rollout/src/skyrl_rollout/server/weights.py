"""WeightService: all-or-nothing replacement of the served weights, of the base or of an adapter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from skyrl_rollout.errors import InvalidRequest, MissingCapability
from skyrl_rollout.server import convert
from skyrl_rollout.server.answers import answered
from skyrl_rollout.server.beginning import update_from_pb
from skyrl_rollout.server.parts import ServerParts
from skyrl_rollout.server.updates import CommitReport
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.v1 import weights_pb2_grpc

MAX_PARALLEL_SHARDS = 4
Phase = pb.PullUpdateResponse


class WeightService(weights_pb2_grpc.WeightServiceServicer):
    """The update RPCs over one `Updater`."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts

    @answered
    async def BeginUpdate(
        self, request: pb.BeginUpdateRequest, context: grpc.aio.ServicerContext
    ) -> pb.BeginUpdateResponse:
        await self._parts.guard.admit(request.fence)
        update = self._parts.updater.begin(update_from_pb(request, self._parts.engine, self._parts.options))
        limit = self._parts.options.max_chunk_bytes
        return pb.BeginUpdateResponse(
            state=convert.number(update.state),
            staged=update.is_staged,
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
        updater, phase, done, total = self._parts.updater, Phase.PHASE_READY, 0, 0
        async with aclosing(updater.pull(request.update_id)) as steps:
            async for done, total in steps:
                await context.write(Phase(phase=phase, bytes_done=done, bytes_total=total))
                phase = Phase.PHASE_PROGRESS
        if updater.releases_source(request.update_id):
            await context.write(Phase(phase=Phase.PHASE_SOURCE_RELEASED, bytes_done=done, bytes_total=total))

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
            weight_version=self._parts.updater.version_of(update),
        )
