"""What callers see of a vLLM that stands still, has too little room, lost its reader, or has weights that are NaN."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio
import numpy as np
import pytest
from serve_process import REPOSITORY, TINY_MODEL, ServeProcess
from served_model import as_tensors
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.events import Heartbeat
from skyrl_rollout.tokens import LogprobMode, Sample, Sampling
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher

pytestmark = pytest.mark.ci
WEDGED_AFTER_S, BEAT_S = 1.5, 0.2
CROWD, TOKENS = 12, 300
SAMPLING = LogprobMode.SAMPLING


@pytest.fixture(scope="module")
def cramped() -> Iterator[ServeProcess]:
    """A server of its own: room for the KV of a quarter of the crowd below, and soon taken for wedged."""
    flags = ("--max-model-len", "512", "--max-num-seqs", "16", "--kv-cache-gib", "0.003")
    with ServeProcess(TINY_MODEL, *flags, "--wedged-after-s", str(WEDGED_AFTER_S)) as running:
        yield running


@pytest.fixture
async def client(cramped: ServeProcess):
    async with await RolloutClient.connect(cramped.url, timeout_s=20) as connected:
        yield connected


async def until(condition, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


@contextmanager
def standing_still(server: ServeProcess) -> Iterator[None]:
    """The engine's processes are stopped, while the front lives."""
    pids = server.engine_pids()
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def crowd(client: RolloutClient, sampling: Sampling = Sampling(max_tokens=TOKENS, seed=3, ignore_eos=True)):  # noqa: B008
    return [
        asyncio.create_task(client.generate([5 + i, 6], sampling, mode=SAMPLING, timeout_s=100)) for i in range(CROWD)
    ]


async def finished(tasks: list[asyncio.Task]) -> list[Sample]:
    return [(await task).samples[0] for task in tasks]


@pytest.mark.parametrize("stopped", ["while it works", "before the request comes"])
async def test_a_stopped_engine_is_told_by_heartbeats_step_counter_and_health_and_loses_nothing(
    cramped: ServeProcess, client: RolloutClient, stopped: str
) -> None:
    asked = Sampling(max_tokens=TOKENS, seed=1, ignore_eos=True)
    whole = (await client.generate([5, 6], asked, mode=SAMPLING, timeout_s=60)).samples[0]
    beats: list[tuple[float, int, str]] = []

    async def read() -> int:
        tokens = 0
        async for event in client.generate_events([5, 6], asked, mode=SAMPLING, timeout_s=60, tokens_per_event=8):
            if isinstance(event, Heartbeat):
                beats.append((time.monotonic(), event.tokens_so_far, event.phase))
            tokens += len(getattr(event, "token_ids", ()))
        return tokens

    beating = await RolloutClient.connect(cramped.url, timeout_s=20, heartbeat_s=BEAT_S)
    async with beating as client:
        made = (await client.status()).tokens_generated
        if stopped == "while it works":
            reading = asyncio.create_task(read())
            await until(lambda: made_since(client, made + 40), 10)
        with standing_still(cramped):
            began = time.monotonic()
            if stopped != "while it works":
                reading = asyncio.create_task(read())
            await asyncio.sleep(0.5)
            first = await client.status()
            assert first.state == "serving" and first.running == 1 and await client.health()
            await until(lambda: is_unhealthy(client), WEDGED_AFTER_S + 2)
            assert time.monotonic() - began > WEDGED_AFTER_S
            second = await client.status()
            assert second.step_counter == first.step_counter and second.tokens_generated == first.tokens_generated
            assert second.running == 1
        seen = [(tokens, phase) for at, tokens, phase in beats if at > began + 0.3]
        assert len(seen) >= 4 and {phase for _, phase in seen} == {"running"} and len({t for t, _ in seen}) == 1
        await until(client.health, 5)
        assert await reading == TOKENS
        again = (await client.generate([5, 6], asked, mode=SAMPLING, timeout_s=60)).samples[0]
    assert again.token_ids.tolist() == whole.token_ids.tolist()


async def made_since(client: RolloutClient, count: int) -> bool:
    return (await client.status()).tokens_generated >= count


async def is_unhealthy(client: RolloutClient) -> bool:
    return not await client.health()


class Trainer:
    def __init__(self, client: RolloutClient) -> None:
        self.client, self.publisher = client, WeightPublisher()

    async def publish(self, weights) -> int:
        info = await self.client.refresh()
        target = PublishTarget(self.client.url, await self.client.acquire_control("test"))
        version = info.weight_version + 1
        await self.publisher.publish(
            info.model.tensors, as_tensors(weights, info.model.tensors), [target],
            target_version=version, timeout_s=60,
        )  # fmt: skip
        return version


@pytest.fixture
async def trainer(client: RolloutClient):
    made = Trainer(client)
    yield made
    made.publisher.close()


async def test_frozen_requests_whose_kv_has_no_room_queue_and_none_is_dropped(client, trainer, model) -> None:
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    whole = await finished(crowd(client, greedy))
    made = (await client.status()).tokens_generated
    tasks = crowd(client, greedy)
    await until(lambda: made_since(client, made + CROWD * TOKENS // 2), 60)
    version = await trainer.publish(model.original)  # with KEEP and RECOMPUTE: the KV of every frozen request is lost
    samples = await finished(tasks)
    assert [s.token_ids.tolist() for s in samples] == [s.token_ids.tolist() for s in whole]
    assert (await client.status()).tokens_generated - made == CROWD * TOKENS
    assert {int(s.weight_versions[-1]) for s in samples} <= {version - 1, version}
    frozen = [s for s in samples if len(s.spans) == 2]
    told = [s.num_preemptions for s in samples]
    assert len(frozen) >= 6 and all(s.num_preemptions for s in frozen)
    assert sum(told) > len(frozen), "the commit preempts each once; more than that is for want of room"


async def test_not_a_number_is_counted_while_tokens_flow_and_older_content_heals(client, trainer, model) -> None:
    asked = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)
    before = (await client.generate([5, 6], asked, mode=LogprobMode.RAW, timeout_s=60)).samples[0]
    broken = dict(model.original)
    broken["model.norm.weight"] = broken["model.norm.weight"] * float("nan")
    version = await trainer.publish(broken)
    for sampling in (asked, Sampling(max_tokens=30, ignore_eos=True)):
        sample = (await client.generate([5, 6], sampling, mode=LogprobMode.RAW, timeout_s=60)).samples[0]
        assert len(sample.token_ids) == sample.invalid_logprobs == 30 and np.isnan(sample.logprobs).all()
        assert set(sample.weight_versions) == {version} and (sample.token_ids >= 0).all()
    assert await client.health()
    healed = await trainer.publish(model.original)
    after = (await client.generate([5, 6], asked, mode=LogprobMode.RAW, timeout_s=60)).samples[0]
    assert after.token_ids.tolist() == before.token_ids.tolist() and set(after.weight_versions) == {healed}
    np.testing.assert_array_equal(after.logprobs, before.logprobs)


async def test_a_killed_agents_kv_is_free_within_two_seconds(cramped: ServeProcess, client: RolloutClient) -> None:
    script = REPOSITORY / "packages/skyrl-rollout/tests/agent_process.py"
    agent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), cramped.url, "doomed", "500", "0", "2", stdout=asyncio.subprocess.PIPE
    )
    assert agent.stdout is not None and (await agent.stdout.readline()) == b"running\n"
    epoch = await client.acquire_control("test")
    async with grpc.aio.insecure_channel(client.url.removeprefix("grpc://")) as channel:
        reset_cache = control_pb2_grpc.EngineServiceStub(channel).ResetCache

        async def is_free() -> bool:
            """The engine resets its cache only where no request holds a block of it."""
            fence = control_pb2.Fence(trainer_epoch=epoch, op_id=str(uuid.uuid4()))
            try:
                await reset_cache(control_pb2.ResetCacheRequest(fence=fence), timeout=5)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                return False
            return True

        assert not await is_free()
        agent.kill()
        await agent.wait()
        killed_at = time.monotonic()
        await until(is_free, 5)
        assert time.monotonic() - killed_at < 2.0 and (await client.status()).running == 0
