"""EngineService: identity, state, pauses and memory of one server."""

from __future__ import annotations

import logging

import grpc.aio

from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.server import convert, description
from skyrl_rollout.server.answers import answered
from skyrl_rollout.server.leases import checked_lease
from skyrl_rollout.server.parts import ServerParts
from skyrl_rollout.server.pausing import DEFAULT_LEASE_S, PauseReport
from skyrl_rollout.v1 import control_pb2 as pb
from skyrl_rollout.v1 import control_pb2_grpc

logger = logging.getLogger(__name__)
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.05
SLEEP_LEVELS = {pb.SleepRequest.LEVEL_OFFLOAD: "offload", pb.SleepRequest.LEVEL_DISCARD: "discard"}


class EngineService(control_pb2_grpc.EngineServiceServicer):
    """The control plane over the parts of one server."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts

    @answered
    async def AcquireControl(
        self, request: pb.AcquireControlRequest, context: grpc.aio.ServicerContext
    ) -> pb.AcquireControlResponse:
        claim = request.claim_epoch if request.HasField("claim_epoch") else None
        epoch, previous, owner = await self._parts.guard.acquire(request.owner, claim)
        return pb.AcquireControlResponse(trainer_epoch=epoch, previous_epoch=previous, previous_owner=owner)

    @answered
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        logger.debug("GetServerInfo from %s, protocol 1.%d", request.client_build, request.client_minor)
        return description.server_info(self._parts)

    @answered
    async def WatchStatus(self, request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext) -> None:
        interval_s = max(convert.seconds(request, "interval", DEFAULT_INTERVAL_S), MIN_INTERVAL_S)
        while True:
            await context.write(description.status(self._parts))
            await self._parts.state.changed.wait(interval_s)

    @answered
    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseResponse:
        mode = convert.known(request.mode, convert.MODE_NAMES, "mode", unset=None)
        admission = convert.known(request.admission, convert.ADMISSION_NAMES, "admission", unset="queue")
        lease_s = checked_lease(convert.seconds(request, "lease", DEFAULT_LEASE_S))
        if lease_s == 0:
            raise InvalidRequest("lease is 0 s: the pause would end at once; leave it unset for 60 s")
        await self._parts.guard.admit(request.fence, needs_op_id=True)
        report: PauseReport = await self._parts.operations.run(
            ("Pause", request.fence.op_id),
            lambda: self._parts.pauser.pause(mode, rejects_new_work=admission == "reject", lease_s=lease_s),
            interruptible=lambda: self._parts.pauser.waits,
        )
        return pb.PauseResponse(
            pause_id=report.pause_id,
            aborted=report.aborted,
            frozen=report.frozen,
            weight_version=report.weight_version,
        )

    @answered
    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.ResumeResponse:
        await self._parts.guard.admit(request.fence, needs_op_id=True)
        version = await self._parts.operations.run(
            ("Resume", request.fence.op_id), lambda: self._parts.pauser.resume(request.pause_id)
        )
        return pb.ResumeResponse(weight_version=version)

    @answered
    async def ResetCache(
        self, request: pb.ResetCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResetCacheResponse:
        # nothing to do for include_external: an engine has no cache of the server's beside its own
        await self._parts.guard.admit(request.fence, needs_op_id=True)
        freed = await self._parts.operations.run(
            ("ResetCache", request.fence.op_id),
            lambda: self._parts.memory.reset_cache(preempt_running=request.preempt_running),
        )
        return pb.ResetCacheResponse(blocks_freed=freed)

    @answered
    async def Sleep(self, request: pb.SleepRequest, context: grpc.aio.ServicerContext) -> pb.SleepResponse:
        await self._parts.guard.admit(request.fence, needs_op_id=True)
        level = convert.known(request.level, SLEEP_LEVELS, "level", unset=None)
        freed = await self._parts.operations.run(
            ("Sleep", request.fence.op_id), lambda: self._parts.memory.sleep(level)
        )
        return pb.SleepResponse(bytes_freed=freed)

    @answered
    async def WakeUp(self, request: pb.WakeUpRequest, context: grpc.aio.ServicerContext) -> pb.WakeUpResponse:
        await self._parts.guard.admit(request.fence, needs_op_id=True)
        state = await self._parts.operations.run(
            ("WakeUp", request.fence.op_id),
            lambda: self._parts.memory.wake_up(weights=request.weights, kv_cache=request.kv_cache),
        )
        return pb.WakeUpResponse(state=convert.number(state))
