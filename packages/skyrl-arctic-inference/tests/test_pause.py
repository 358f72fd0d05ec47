"""Pausing a real vLLM server: what becomes of running work, exact counts, slots given back."""

from __future__ import annotations

import asyncio
import time

import pytest
from serve_process import TINY_MODEL, ServeProcess
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling

pytestmark = pytest.mark.ci
LONG = Sampling(max_tokens=480, seed=1, ignore_eos=True)
SAMPLING = LogprobMode.SAMPLING


def start(client, count: int, sampling: Sampling = LONG, **more):
    return [
        asyncio.create_task(client.generate([5 + i, 6], sampling, mode=SAMPLING, timeout_s=60, **more))
        for i in range(count)
    ]


async def until(condition, timeout_s: float) -> float:
    """Seconds until `condition` holds."""
    began = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - began


async def test_keep_freezes_requests_between_two_tokens_and_resume_loses_none(client):
    epoch = await client.acquire_control("test")
    alone = (await client.generate([5, 6], LONG, mode=SAMPLING, timeout_s=60)).samples[0]
    running = start(client, 8)
    await asyncio.sleep(0.15)
    pause = await client.pause(epoch, "keep")
    first = await client.status()
    await asyncio.sleep(0.3)
    second = await client.status()
    assert first.state == "paused" and first.frozen and second.tokens_generated == first.tokens_generated
    assert second.step_counter == first.step_counter
    await client.resume(epoch, pause)
    samples = [(await task).samples[0] for task in running]
    assert {len(s.token_ids) for s in samples} == {480}
    assert samples[0].token_ids.tolist() == alone.token_ids.tolist()


async def test_abort_ends_requests_as_paused_with_their_tokens_and_prompt_plus_tokens_goes_on(client):
    epoch = await client.acquire_control("test")
    running = start(client, 4, num_samples=2)
    await asyncio.sleep(0.15)
    pause = await client.pause(epoch, "abort")
    samples = [s for task in running for s in (await task).samples]
    assert {s.finish_reason for s in samples} == {FinishReason.PAUSED}
    assert all(0 < len(s.token_ids) < 480 for s in samples)
    await client.resume(epoch, pause)
    prompt = [5, 6, *samples[0].token_ids.tolist()]
    rest = await client.generate(prompt, Sampling(max_tokens=5, ignore_eos=True), mode=SAMPLING, timeout_s=30)
    assert len(rest.samples[0].token_ids) == 5


async def test_wait_returns_after_running_requests_have_finished_and_queues_new_ones(client):
    epoch = await client.acquire_control("test")
    running = start(client, 4, Sampling(max_tokens=200, ignore_eos=True))
    await asyncio.sleep(0.1)
    pause = await client.pause(epoch, "wait", timeout_s=60)
    assert (await client.status()).running == 0
    queued = start(client, 1, Sampling(max_tokens=4, ignore_eos=True))[0]
    await asyncio.sleep(0.2)
    assert not queued.done()
    await client.resume(epoch, pause)
    assert len((await queued).samples[0].token_ids) == 4
    assert {(await t).samples[0].finish_reason for t in running} == {FinishReason.LENGTH}


async def test_status_counts_what_runs_and_every_step(client):
    before = await client.status()
    running = start(client, 6)
    seen = []

    async def all_run_and_hold_cache() -> bool:
        seen.append(await client.status())
        return seen[-1].running == 6 and seen[-1].kv_usage > 0  # the first step reports the cache

    await until(all_run_and_hold_cache, 5)
    status = seen[-1]
    assert status.step_counter > before.step_counter
    await asyncio.gather(*running)
    after = await client.status()
    assert after.running == 0 and after.kv_usage == 0 and after.step_counter > status.step_counter


async def reports(client, *, running: int) -> bool:
    return (await client.status()).running == running


async def test_ended_requests_give_their_slots_back_within_two_seconds():
    with ServeProcess(TINY_MODEL, "--max-num-seqs", "2", "--max-model-len", "2048") as small:
        async with await RolloutClient.connect(small.url, timeout_s=20) as client:
            ids = ["hold-0", "hold-1"]
            holding, waiting = await fill_both_slots(client, ids)
            began = time.monotonic()
            assert (await client.abort(ids)) == (ids, [])
            ended = [(await task).samples[0] for task in holding]
            assert {s.finish_reason for s in ended} == {FinishReason.ABORTED} and all(len(s.token_ids) for s in ended)
            await waiting
            assert time.monotonic() - began < 2.0
            assert (await client.abort(ids)) == ([], ids)
            holding, waiting = await fill_both_slots(client, ["drop-0", "drop-1"])
            began = time.monotonic()
            for task in holding:
                task.cancel()
            await waiting
            assert time.monotonic() - began < 2.0


async def fill_both_slots(client, ids: list[str]):
    """Two requests that run, each with tokens already, and one that waits for a slot."""
    endless, single = Sampling(max_tokens=2000, ignore_eos=True), Sampling(max_tokens=1)
    holding = [
        asyncio.create_task(client.generate([5], endless, mode=SAMPLING, timeout_s=60, request_id=i)) for i in ids
    ]
    await until(lambda: reports(client, running=2), 5)
    both_run = (await client.status()).step_counter

    async def both_have_tokens() -> bool:
        return (await client.status()).step_counter >= both_run + 2

    await until(both_have_tokens, 5)
    waiting = asyncio.create_task(client.generate([7], single, mode=SAMPLING, timeout_s=60))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    return holding, waiting
