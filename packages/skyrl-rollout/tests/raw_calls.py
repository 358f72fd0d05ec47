"""Raw calls to a real server process over a socket: the generated stubs, and what a stream said."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2_grpc
from skyrl_rollout.conformance.answers import Answer
from skyrl_rollout.errors import RolloutError, from_rpc_error
from skyrl_rollout.reference.process import ServedProcess
from skyrl_rollout.v1 import (
    control_pb2,
    control_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    weights_pb2_grpc,
)

PROMPT = np.arange(1, 9, dtype="<i4")


class RawCalls:
    """The generated stubs of one channel; errors come back typed."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.rollout = generation_pb2_grpc.RolloutServiceStub(channel)
        self.engine = control_pb2_grpc.EngineServiceStub(channel)
        self.weights = weights_pb2_grpc.WeightServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    def stream(self, request: generation_pb2.GenerateRequest, timeout_s: float = 20) -> grpc.aio.UnaryStreamCall:
        return self.rollout.Generate(request, timeout=timeout_s)

    async def generate(self, request: generation_pb2.GenerateRequest, timeout_s: float = 20) -> Answer:
        answer = Answer()
        async for m in self.stream(request, timeout_s):
            answer.take(m)
        return answer

    async def status(self) -> control_pb2.WatchStatusResponse:
        call = self.engine.WatchStatus(control_pb2.WatchStatusRequest(), timeout=10)
        first = await call.read()
        call.cancel()
        return first

    async def epoch(self, owner: str = "test") -> int:
        reply = await self.engine.AcquireControl(control_pb2.AcquireControlRequest(owner=owner), timeout=10)
        return reply.trainer_epoch


@asynccontextmanager
async def raw_calls(server: ServedProcess) -> AsyncIterator[RawCalls]:
    async with grpc.aio.insecure_channel(server.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield RawCalls(channel)


def ask(max_tokens: int | None = 32, **fields: object) -> generation_pb2.GenerateRequest:
    """A seeded request that never meets an end token, unless told otherwise."""
    sampling = {"ignore_eos": True, "seed": 7} | dict(fields.pop("sampling", {}))  # type: ignore[call-overload]
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    given = {"request_id": str(uuid.uuid4()), "prompt_token_ids": PROMPT.tobytes()} | fields
    return generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(**sampling), **given)


def fence(epoch: int, op_id: str | None = None) -> control_pb2.Fence:
    return control_pb2.Fence(trainer_epoch=epoch, op_id=op_id or str(uuid.uuid4()))


async def refused(call: object) -> RolloutError:
    """The typed error of a call that must fail."""
    try:
        if hasattr(call, "__aiter__") and not hasattr(call, "__await__"):
            async for _ in call:  # type: ignore[attr-defined]
                pass
        else:
            await call  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was not refused")
