"""What many callers at once get: an answer, or a refusal that says when to come back; never a call without a reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from raw_calls import RawCalls, ask, raw_calls
from skyrl_rollout.errors import from_rpc_error
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb

BURST = 2000
OPEN_STREAMS = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--max-concurrent", str(OPEN_STREAMS)) as process:
        yield process


@pytest.mark.ci
async def test_two_thousand_calls_at_once_are_answered_or_told_when_to_come_back(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        told = Counter(await asyncio.gather(*(outcome(calls) for _ in range(BURST))))
        assert set(told) <= {"answered", "RESOURCE_EXHAUSTED/OVERLOADED/retry"}, told
        assert told["answered"] >= OPEN_STREAMS
        assert await outcome(calls) == "answered"


@pytest.mark.ci
async def test_a_thousand_open_streams_leave_the_other_calls_alone(server: ReferenceServer) -> None:
    held = pb.VersionPolicy(min_weight_version=9)
    quiet = pb.StreamOptions(heartbeat=Duration(seconds=1))
    async with raw_calls(server) as calls, raw_calls(server) as watcher:
        streams = [calls.stream(ask(3, version=held, stream=quiet), timeout_s=60) for _ in range(OPEN_STREAMS)]
        await asyncio.gather(*(stream.read() for stream in streams))
        reports = watcher.engine.WatchStatus(control_pb2.WatchStatusRequest(interval=Duration(nanos=50_000_000)))
        assert (await reports.read()).waiting == OPEN_STREAMS
        for _ in range(20):
            assert (await reports.read()).waiting == OPEN_STREAMS
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watcher.generate(ask(3))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reports.cancel()
        for stream in streams:
            stream.cancel()


async def outcome(calls: RawCalls) -> str:
    try:
        await calls.generate(ask(2), timeout_s=60)
    except grpc.aio.AioRpcError as raised:
        error = from_rpc_error(raised)
        return f"{error.code.name}/{error.reason}" + ("/retry" if error.retry_after_s else "")
    return "answered"
