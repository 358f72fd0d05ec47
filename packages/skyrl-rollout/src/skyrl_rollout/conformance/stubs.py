"""The generated stubs of one connection, as a client that knows nothing but the protocol would use them."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from skyrl_rollout.channel import open_channel
from skyrl_rollout.conformance.item import Failed, expect
from skyrl_rollout.errors import RolloutError, from_rpc_error
from skyrl_rollout.security import ANONYMOUS, Credentials
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc, generation_pb2_grpc, weights_pb2_grpc

CALL_S = 10.0
OK = grpc.StatusCode.OK


class _Signed:
    """A stub whose every call carries the caller's credentials and, unless given, a deadline."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub, self._metadata = stub, metadata

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._stub, name), metadata=self._metadata, timeout=CALL_S)


class Stubs:
    """All services of one server over one channel. Errors are those of gRPC."""

    def __init__(self, url: str, credentials: Credentials = ANONYMOUS, *, ping_interval_ms: int = 20_000) -> None:
        self.channel = open_channel(url, credentials, keepalive_interval_ms=ping_interval_ms)
        self.metadata = credentials.metadata()
        self.rollout = self._signed(generation_pb2_grpc.RolloutServiceStub)
        self.engine = self._signed(control_pb2_grpc.EngineServiceStub)
        self.weights = self._signed(weights_pb2_grpc.WeightServiceStub)
        self.health = self._signed(health_pb2_grpc.HealthStub)
        self.reflection = self._signed(reflection_pb2_grpc.ServerReflectionStub)

    async def __aenter__(self) -> Stubs:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close()

    async def info(self, timeout_s: float = CALL_S) -> control_pb2.GetServerInfoResponse:
        """Who answers."""
        info: control_pb2.GetServerInfoResponse = await self.engine.GetServerInfo(
            control_pb2.GetServerInfoRequest(), timeout=timeout_s
        )
        return info

    async def status(self) -> control_pb2.WatchStatusResponse:
        """The first report of WatchStatus, which must come at once."""
        call = self.engine.WatchStatus(control_pb2.WatchStatusRequest())
        try:
            report = await call.read()
        finally:
            call.cancel()
        expect(isinstance(report, control_pb2.WatchStatusResponse), "WatchStatus ended without a report")
        return report

    def _signed(self, stub: Any) -> Any:
        return _Signed(stub(self.channel), self.metadata)


async def outcome(call: Any) -> RolloutError | None:
    """The typed error of a unary call or a stream, None where it succeeds."""
    try:
        if isinstance(call, Awaitable):
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def refused(call: Any, *codes: grpc.StatusCode, what: str) -> RolloutError:
    """The error of a call that must end with one of `codes`. Raises Failed otherwise."""
    error = await outcome(call)
    names = " or ".join(code.name for code in codes)
    if error is None:
        raise Failed(f"{what} succeeded, expected {names}")
    expect(error.code in codes, f"{what} ended with {error.code.name} ({error.message}), expected {names}")
    return error
