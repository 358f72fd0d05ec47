"""A slow connection, cut now and then: every token and every weight arrives, once, and nobody waits for the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from raw_calls import RawCalls
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher
from tcp_proxy import TcpProxy
from test_publisher import served, weights

SAMPLES, TOKENS = 8, 2000
ASKED = Sampling(max_tokens=TOKENS, seed=3, ignore_eos=True)
ANSWER_BYTES = SAMPLES * TOKENS * 8
BYTES_PER_S = 45_000.0


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary") as process:
        yield process


@pytest.fixture(scope="module")
def large() -> Iterator[ReferenceServer]:
    """1.4 MB of weights."""
    with ReferenceServer("--logits", "canary", "--vocab-size", "20000") as process:
        yield process


async def whole(server: ReferenceServer) -> list[list[int]]:
    async with await RolloutClient.connect(server.url) as direct:
        generation = await direct.generate([1], ASKED, mode=LogprobMode.RAW, timeout_s=60, num_samples=SAMPLES)
    return [s.token_ids.tolist() for s in generation.samples]


@pytest.mark.ci
@pytest.mark.parametrize("cuts", [0, 4])
async def test_a_generation_over_a_slow_connection_arrives_whole_and_is_made_once(
    server: ReferenceServer, calls: RawCalls, cuts: int
) -> None:
    expected = await whole(server)
    before = (await calls.status()).tokens_generated
    async with TcpProxy(server.url) as proxy, await RolloutClient.connect(proxy.url) as slow:
        proxy.bytes_per_s = BYTES_PER_S
        loop = asyncio.get_running_loop()
        for i in range(cuts):
            loop.call_later(0.3 * (i + 1), proxy.cut)
        began = loop.time()
        generation = await slow.generate(
            [1], ASKED, mode=LogprobMode.RAW, timeout_s=60, num_samples=SAMPLES, on_progress=lambda n: None,
            backend_options={"token_delay_s": 0.001},
        )  # fmt: skip
        assert loop.time() - began > 0.8 * ANSWER_BYTES / BYTES_PER_S, "the connection was not slow"
        assert (await calls.status()).tokens_generated - before == SAMPLES * TOKENS
    assert [s.token_ids.tolist() for s in generation.samples] == expected
    assert generation.num_restarts == 0 and (proxy.connections > 1) is bool(cuts)


@pytest.mark.ci
async def test_a_publish_over_a_slow_connection_that_breaks_arrives_whole_and_other_callers_do_not_notice(
    large: ReferenceServer,
) -> None:
    publisher = WeightPublisher("inline")
    async with (
        TcpProxy(large.url) as proxy,
        await RolloutClient.connect(large.url) as direct,
        await RolloutClient.connect(proxy.url) as slow,
    ):
        layout, epoch = direct.info.model.tensors, await direct.acquire_control("trainer")
        version = direct.info.weight_version + 1
        proxy.bytes_per_s = 800_000.0
        publishing = asyncio.create_task(
            publisher.publish(
                layout, weights(layout, 77), [PublishTarget(slow.url, epoch)], target_version=version, timeout_s=60
            )
        )
        answers = 0
        while not publishing.done():
            assert (await served_version(direct)) in (version - 1, version)
            answers += 1
            if answers == 20:
                proxy.cut()
            await asyncio.sleep(0.02)
        report = await publishing
        assert answers > 20 and report.nbytes < proxy.bytes_to_server < 2 * report.nbytes
        assert await served(direct) == (version, 77)


async def served_version(client: RolloutClient) -> int:
    (sample,) = (await client.generate([1], Sampling(max_tokens=1), mode=LogprobMode.RAW, timeout_s=2)).samples
    return int(sample.weight_versions[0])


@pytest.mark.ci
async def test_a_commit_does_not_wait_for_slow_readers_and_every_token_has_its_version(server: ReferenceServer) -> None:
    publisher = WeightPublisher()
    async with (
        TcpProxy(server.url) as proxy,
        await RolloutClient.connect(server.url) as direct,
        await RolloutClient.connect(proxy.url) as slow,
    ):
        layout, epoch = direct.info.model.tensors, await direct.acquire_control("trainer")

        async def publish(token: int) -> int:
            version = (await direct.refresh()).weight_version + 1
            target = PublishTarget(direct.url, epoch)
            await publisher.publish(layout, weights(layout, token), [target], target_version=version, timeout_s=20)
            return version

        old, made = await publish(10), (await direct.status()).tokens_generated
        proxy.bytes_per_s = BYTES_PER_S
        reading = asyncio.create_task(
            slow.generate(
                [1], ASKED, mode=LogprobMode.RAW, timeout_s=60, num_samples=SAMPLES, on_progress=lambda n: None,
                backend_options={"token_delay_s": 0.001},
            )
        )  # fmt: skip
        while (await direct.status()).tokens_generated < made + SAMPLES * TOKENS // 8:
            await asyncio.sleep(0.01)
        new = await publish(20)
        assert not reading.done(), "the readers were not slow"
        generation = await reading
    for sample in generation.samples:
        before, after = sample.spans
        assert [s.weight_version for s in sample.spans] == [old, new] and before.length + after.length == TOKENS
        np.testing.assert_array_equal(sample.token_ids, [10] * before.length + [20] * after.length)
    publisher.close()
