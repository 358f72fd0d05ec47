"""What a real server process gives back when asked: its cache, or all its memory while it sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from raw_calls import RawCalls, ask, fence, raw_calls, refused
from raw_updates import (
    adapter_draft,
    begin,
    commit,
    delta_draft,
    draft,
    forcing,
    published,
    staged,
    state,
    version,
    versions,
)
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2 as pb

OFFLOAD, DISCARD = pb.SleepRequest.LEVEL_OFFLOAD, pb.SleepRequest.LEVEL_DISCARD
TABLE_NBYTES = 2 * (65_536 + 64) * 8
LONG_PROMPT = {"prompt_token_ids": np.arange(48, dtype="<i4").tobytes()}


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--token-delay-ms", "2", "--delta") as process:
        yield process


@pytest.fixture(autouse=True)
async def awake(calls: RawCalls, epoch: int) -> None:
    """Serving version n, under which the server says n % 60."""
    await wake(calls, epoch)
    await published(calls, epoch, draft(target := await version(calls) + 1, forcing(target % 60)))


async def reset(calls: RawCalls, epoch: int, **fields: Any) -> int:
    request = pb.ResetCacheRequest(**({"fence": fence(epoch)} | fields))
    return (await calls.engine.ResetCache(request, timeout=10)).blocks_freed


async def sleep(calls: RawCalls, epoch: int, level: int, **fields: Any) -> int:
    request = pb.SleepRequest(**({"fence": fence(epoch), "level": level} | fields))
    return (await calls.engine.Sleep(request, timeout=10)).bytes_freed


async def wake(calls: RawCalls, epoch: int, **fields: Any) -> str:
    request = pb.WakeUpRequest(**({"fence": fence(epoch)} | fields))
    reply = await calls.engine.WakeUp(request, timeout=10)
    return pb.EngineState.Name(reply.state).removeprefix("ENGINE_STATE_")


async def health(calls: RawCalls, service: str = "") -> int:
    return (await calls.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def running(calls: RawCalls, **fields: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(calls.generate(ask(3000, **fields)))
    while not (await calls.status()).running:
        await asyncio.sleep(0.005)
    return task


async def test_the_server_says_what_it_can_give_back(calls: RawCalls) -> None:
    offers = (await calls.engine.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)).capabilities
    assert (offers.sleep, offers.reset_cache, offers.delta, offers.lora) == (True, True, True, True)


async def test_a_reset_drops_cached_blocks_once_per_op_id(calls: RawCalls, epoch: int) -> None:
    await calls.generate(ask(2, **LONG_PROMPT))
    op = fence(epoch)
    assert await reset(calls, epoch, fence=op) == 3
    assert (await calls.generate(ask(2, **LONG_PROMPT))).started.cached_prompt_tokens == 0  # type: ignore[union-attr]
    assert await reset(calls, epoch, fence=op) == 3
    assert (await calls.generate(ask(2, **LONG_PROMPT))).started.cached_prompt_tokens == 48  # type: ignore[union-attr]
    assert await reset(calls, epoch) == 3
    assert await reset(calls, epoch) == 0


async def test_a_reset_under_running_work_is_refused_unless_it_may_preempt(calls: RawCalls, epoch: int) -> None:
    task = await running(calls, **LONG_PROMPT, sampling={"max_tokens": 300})
    error = await refused(reset(calls, epoch))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert "preempt_running" in error.message
    assert await reset(calls, epoch, preempt_running=True) == 3
    task.cancel()
    unnamed = await refused(reset(calls, epoch, fence=pb.Fence(trainer_epoch=epoch)))
    assert unnamed.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_preempted_sample_says_so(calls: RawCalls, epoch: int) -> None:
    whole = await calls.generate(ask(60))
    task = asyncio.create_task(calls.generate(ask(60)))
    while not (await calls.status()).running:
        await asyncio.sleep(0.002)
    await reset(calls, epoch, preempt_running=True)
    answer = await task
    assert answer.tokens() == whole.tokens()
    assert answer.finished[0].num_preemptions == 1


async def test_a_server_that_offloaded_serves_the_same_version_when_it_wakes(calls: RawCalls, epoch: int) -> None:
    before, now = await calls.generate(ask(5, **LONG_PROMPT)), await version(calls)
    await published(calls, epoch, adapter_draft("red", now, 9))
    op = fence(epoch)
    freed = await sleep(calls, epoch, OFFLOAD, fence=op)
    assert freed >= TABLE_NBYTES
    assert await sleep(calls, epoch, OFFLOAD, fence=op) == freed
    assert (await calls.status()).state == pb.ENGINE_STATE_ASLEEP
    assert (await refused(calls.stream(ask(3)))).code is grpc.StatusCode.FAILED_PRECONDITION
    assert await wake(calls, epoch) == "SERVING"
    after = await calls.generate(ask(5, **LONG_PROMPT))
    assert (after.tokens(), await version(calls)) == (before.tokens(), now)
    assert after.started is not None
    assert after.started.cached_prompt_tokens == 0
    assert (await calls.generate(ask(3, policy_id="red"))).tokens() == [9] * 3


async def test_health_follows_sleep_and_waiting_for_weights(calls: RawCalls, epoch: int) -> None:
    up, down = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    watch = calls.health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
    assert (await watch.read()).status == up
    await sleep(calls, epoch, DISCARD)
    assert (await watch.read()).status == down
    assert await wake(calls, epoch) == "AWAITING_WEIGHTS"
    assert await health(calls) == down
    assert await health(calls, "skyrl_rollout.v1.WeightService") == up
    await published(calls, epoch, draft(await version(calls) + 1))
    assert (await watch.read()).status == up
    watch.cancel()


async def test_a_server_that_discarded_awaits_every_tensor(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    await published(calls, epoch, adapter_draft("blue", now, 9))
    await sleep(calls, epoch, DISCARD)
    assert await wake(calls, epoch) == "AWAITING_WEIGHTS"
    assert (await calls.status()).state == pb.ENGINE_STATE_AWAITING_WEIGHTS
    error = await refused(calls.stream(ask(3)))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert "publish every tensor" in error.message
    assert await versions(calls) == {"": now}
    changes = {"canary.weight": ([3], np.ones(1, "<f4"))}
    whole = forcing(now % 60)
    whole["canary.weight"][3] = 1
    for part in (delta_draft(now + 1, now, changes, whole), adapter_draft("blue", now + 1, 9)):
        refusal = await refused(begin(calls, epoch, part))
        assert (refusal.code, "publish every tensor" in refusal.message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    await published(calls, epoch, draft(now + 1, forcing(44)))
    assert (await calls.generate(ask(3))).tokens() == [44] * 3


async def test_discarded_weights_may_be_published_again_as_the_same_version(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    await sleep(calls, epoch, DISCARD)
    await wake(calls, epoch)
    assert (await refused(begin(calls, epoch, draft(now, forcing(33))))).reason == "VERSION_CONFLICT"
    await published(calls, epoch, draft(now, forcing(now % 60)))
    assert ((await calls.generate(ask(3))).tokens(), await version(calls)) == ([now % 60] * 3, now)


async def test_weights_can_be_committed_before_the_cache_takes_its_memory(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = await staged(calls, epoch, draft(now + 1, forcing(50)))
    await sleep(calls, epoch, DISCARD)
    early = await refused(commit(calls, epoch, d.update_id, now))
    assert (early.code, "WakeUp" in early.message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert await wake(calls, epoch, weights=True) == "ASLEEP"
    reply = await commit(calls, epoch, d.update_id, now)
    assert (reply.weight_version, (await calls.status()).state) == (now + 1, pb.ENGINE_STATE_ASLEEP)
    assert await state(calls, d.update_id) == "COMMITTED"
    assert await wake(calls, epoch, kv_cache=True) == "SERVING"
    assert (await calls.generate(ask(3))).tokens() == [50] * 3


async def test_sleep_needs_a_server_with_nothing_to_do(calls: RawCalls, epoch: int) -> None:
    task = await running(calls)
    error = await refused(sleep(calls, epoch, OFFLOAD))
    assert (error.code, "1 requests run" in error.message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    task.cancel()
    unset = await refused(sleep(calls, epoch, 0))
    unknown = await refused(sleep(calls, epoch, 77))
    assert {unset.code, unknown.code} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert (await calls.status()).state == pb.ENGINE_STATE_SERVING


async def test_a_sleeping_server_takes_no_order_but_to_wake_up(calls: RawCalls, epoch: int) -> None:
    await sleep(calls, epoch, OFFLOAD)
    pause = pb.PauseRequest(fence=fence(epoch), mode=pb.PAUSE_MODE_KEEP)
    attempts = [
        sleep(calls, epoch, OFFLOAD),
        reset(calls, epoch),
        calls.engine.Pause(pause, timeout=5),
    ]
    assert {(await refused(a)).code for a in attempts} == {grpc.StatusCode.FAILED_PRECONDITION}
    assert (await calls.status()).state == pb.ENGINE_STATE_ASLEEP
    higher = await calls.epoch("the next trainer")
    assert (await calls.status()).state == pb.ENGINE_STATE_ASLEEP
    assert await wake(calls, higher) == "SERVING"
    assert await wake(calls, higher) == "SERVING"


async def test_a_sleeping_server_ends_on_sigterm() -> None:
    with ReferenceServer() as other:
        async with raw_calls(other) as calls:
            await sleep(calls, await calls.epoch(), DISCARD)
        assert await asyncio.to_thread(other.stop) == 0


async def test_sleep_ends_the_pause_that_is_held(calls: RawCalls, epoch: int) -> None:
    request = pb.PauseRequest(fence=fence(epoch), mode=pb.PAUSE_MODE_WAIT)
    paused = await calls.engine.Pause(request, timeout=5)
    await sleep(calls, epoch, OFFLOAD)
    resume = pb.ResumeRequest(fence=fence(epoch), pause_id=paused.pause_id)
    assert (await refused(calls.engine.Resume(resume, timeout=5))).code is grpc.StatusCode.NOT_FOUND
    assert await wake(calls, epoch) == "SERVING"
    assert len((await calls.generate(ask(3))).tokens()) == 3
