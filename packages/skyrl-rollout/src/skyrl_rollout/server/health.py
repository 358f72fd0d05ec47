"""grpc.health.v1 per service: SERVING while requests are accepted, if only queued; Watch stays open."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.state import FINAL, EngineState, ServerState
from skyrl_rollout.v1 import control_pb2, generation_pb2, weights_pb2

logger = logging.getLogger(__name__)

ROLLOUT_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
ENGINE_SERVICE = control_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
WEIGHT_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
SERVICES = (ROLLOUT_SERVICE, ENGINE_SERVICE, WEIGHT_SERVICE)

Status = health_pb2.HealthCheckResponse
WATCHDOG_INTERVAL_S = 1.0


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers from the server's state; "" is the server as a whole, which is as healthy as its data plane."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def status(self, service: str) -> int:
        if service in ("", ROLLOUT_SERVICE):
            return Status.SERVING if self._state.takes_work else Status.NOT_SERVING
        if service in SERVICES:
            return Status.NOT_SERVING if self._state.state in FINAL else Status.SERVING
        return Status.SERVICE_UNKNOWN

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self.status(request.service)
        if status == Status.SERVICE_UNKNOWN:
            known = ", ".join(SERVICES)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here: there are {known}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        last = None
        while True:
            status = self.status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
                continue  # the state may have moved while the reader was slow
            await self._state.changed.wait()


async def watch_for_wedge(engine: Engine, state: ServerState, wedged_after_s: float) -> None:
    """Marks the server wedged while there is work and no engine step happens for `wedged_after_s`; never returns."""
    steps, since = -1, time.monotonic()
    while True:
        await asyncio.sleep(min(WATCHDOG_INTERVAL_S, wedged_after_s / 4))
        load, now = engine.load(), time.monotonic()
        busy = load.running + load.waiting
        if load.step_counter != steps or not busy or state.state is not EngineState.SERVING:
            steps, since = load.step_counter, now
        wedged = now - since > wedged_after_s
        if wedged and not state.wedged:
            logger.error("wedged: %d samples run or wait, no engine step for %.0f s", busy, now - since)
        state.set_wedged(wedged)
