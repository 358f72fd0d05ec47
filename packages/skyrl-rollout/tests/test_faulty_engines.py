"""What callers see of an engine that fails: a reason on every stream, and health that tells."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from raw_calls import Answer, RawCalls, ask, fence, raw_calls, refused
from raw_updates import adapter_draft, begin, commit, draft, published, staged, state, version
from skyrl_rollout.reference.process import ServedProcess
from skyrl_rollout.v1 import control_pb2, weights_pb2
from skyrl_rollout.weights.shm import namespace_id

SCRIPT = str(Path(__file__).with_name("faulty_server.py"))


def faulty(fault: str) -> AbstractContextManager[ServedProcess]:
    return ServedProcess([sys.executable, SCRIPT, fault])


async def health(calls: RawCalls) -> int:
    return (await calls.health.Check(health_pb2.HealthCheckRequest(), timeout=5)).status


async def test_weights_that_fail_half_way_poison_the_server_and_say_so() -> None:
    with faulty("FailsToLoad") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            running = asyncio.create_task(calls.generate(ask(4000)))
            d = await staged(calls, epoch, draft(1))
            error = await refused(commit(calls, epoch, d.update_id, 0))
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POISONED")
            assert "the worker died half way" in error.message
            assert (await running).reason() == "ABORTED"
            assert await state(calls, d.update_id) == "FAILED"
            assert (await calls.status()).state == control_pb2.ENGINE_STATE_POISONED
            assert await health(calls) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await version(calls) == 0
            assert (await refused(calls.stream(ask(3)))).reason == "POISONED"
            assert (await refused(staged(calls, epoch, draft(2)))).reason == "POISONED"
        assert await asyncio.to_thread(server.stop) == 0


async def test_a_commit_whose_reply_is_lost_can_be_asked_for() -> None:
    with faulty("LoadsSlowly") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            d = await staged(calls, epoch, draft(1))
            request = weights_pb2.CommitUpdateRequest(fence=fence(epoch), update_id=d.update_id)
            lost = await refused(calls.weights.CommitUpdate(request, timeout=0.15))
            assert lost.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await state(calls, d.update_id) == "COMMITTING"
            busy = calls.weights.AbortUpdate(weights_pb2.AbortUpdateRequest(fence=fence(epoch), update_id=d.update_id))
            assert (await refused(busy)).code is grpc.StatusCode.FAILED_PRECONDITION
            again = await commit(calls, epoch, d.update_id, 0)
            reply = await calls.weights.GetUpdate(weights_pb2.GetUpdateRequest(update_id=d.update_id), timeout=5)
            assert (reply.state, reply.weight_version) == (weights_pb2.UPDATE_STATE_COMMITTED, 1)
            assert (again.previous_version, again.weight_version) == (0, 1)


async def test_an_adapter_that_fails_is_dropped_and_everything_else_serves_on() -> None:
    with faulty("FailsOnAdapters") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            await published(calls, epoch, adapter_draft("red", 1, 5))
            running = [asyncio.create_task(calls.generate(ask(60, policy_id=policy))) for policy in ("red", "")]
            while (await calls.status()).running < 2:
                await asyncio.sleep(0.005)
            d = await staged(calls, epoch, adapter_draft("red", 2, 6))
            error = await refused(commit(calls, epoch, d.update_id, 1))
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "ADAPTER_FAILED")
            assert "the adapter broke" in error.message
            red, base = [await answer for answer in running]
            assert (red.reason(), base.reason(), len(base.tokens())) == ("ABORTED", "LENGTH", 60)
            assert [s[2] for s in red.spans()] == [1]
            assert (await refused(calls.stream(ask(3, policy_id="red")))).reason == "UNKNOWN_POLICY"
            assert await state(calls, d.update_id) == "FAILED"
            assert (await calls.status()).state == control_pb2.ENGINE_STATE_SERVING
            await published(calls, epoch, draft(1))


async def test_an_engine_that_cannot_sleep_serves_on() -> None:
    with faulty("FailsToSleep") as server:
        async with raw_calls(server) as calls:
            request = control_pb2.SleepRequest(fence=fence(await calls.epoch()), level=1)
            error = await refused(calls.engine.Sleep(request, timeout=5))
            assert "no room on the host" in error.message
            assert (await calls.status()).state == control_pb2.ENGINE_STATE_SERVING
            assert len((await calls.generate(ask(3))).tokens()) == 3


async def test_an_engine_that_raises_ends_the_stream_with_its_tokens_and_its_words() -> None:
    with faulty("Raises") as server:
        async with raw_calls(server) as calls:
            stream, answer = calls.stream(ask(200)), Answer()
            error = await refused(read_all(stream, answer))
    assert error.code is grpc.StatusCode.INTERNAL
    assert "the worker died" in error.message
    assert answer.started is not None


async def test_an_engine_that_ends_without_a_reason_is_an_error() -> None:
    with faulty("EndsSilently") as server:
        async with raw_calls(server) as calls:
            error = await refused(calls.stream(ask(20)))
    assert "without saying why" in error.message


async def test_what_an_engine_cannot_honour_is_refused_in_its_words() -> None:
    with faulty("Refuses") as server:
        async with raw_calls(server) as calls:
            error = await refused(calls.stream(ask(20, sampling={"min_p": 0.1})))
            assert (await calls.status()).waiting == 0
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "min_p does not combine" in error.message


@pytest.mark.parametrize("fault", ["Wedges", "NeverSteps"])
async def test_an_engine_that_makes_no_step_while_there_is_work_is_not_healthy(fault: str) -> None:
    with faulty(fault) as server:
        async with raw_calls(server) as calls:
            watch = calls.health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            running = asyncio.create_task(calls.generate(ask(4000)))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            running.cancel()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()


def test_an_engine_that_does_not_start_is_one_line_and_an_exit_code() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "DoesNotStart"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (1, "error: there is no model here\n")


async def read_all(stream: grpc.aio.UnaryStreamCall, answer: Answer) -> None:
    async for m in stream:
        answer.take(m)


async def test_a_server_whose_engine_aborts_nothing_ends_and_its_streams_end_with_their_tokens() -> None:
    with faulty("NeverAborts") as server:
        async with raw_calls(server) as calls:
            running = asyncio.create_task(calls.generate(ask(4000)))
            while not (await calls.status()).tokens_generated:
                await asyncio.sleep(0.01)
            pause = control_pb2.PauseRequest(fence=fence(await calls.epoch()), mode=control_pb2.PAUSE_MODE_KEEP)
            await calls.engine.Pause(pause, timeout=5)  # frozen work gets no grace, which would only be waited for
            made = (await calls.status()).tokens_generated
            server.process.terminate()
            answer = await asyncio.wait_for(running, 10)
            assert (answer.reason(), len(answer.tokens())) == ("ABORTED", made)
        assert await asyncio.to_thread(server.process.wait, 10) == 0


async def test_an_update_for_which_the_engine_has_no_room_is_refused_at_begin() -> None:
    with faulty("NeedsRoom") as server:
        async with raw_calls(server) as calls:
            epoch, segments = await calls.epoch(), [weights_pb2.ShmSegment(shard=0, name="any", nbytes=1)]
            shm = weights_pb2.ShmTransport(namespace_id=namespace_id(), segments=segments)
            for transport in (
                weights_pb2.Transport(inline=weights_pb2.InlineTransport()),
                weights_pb2.Transport(shm=shm),
            ):
                d = draft(1)
                error = await refused(begin(calls, epoch, d, transport=transport))
                assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL")
                assert await state(calls, d.update_id) == "ABORTED"
            assert len((await calls.generate(ask(3))).tokens()) == 3
