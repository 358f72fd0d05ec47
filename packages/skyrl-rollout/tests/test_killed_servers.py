"""A server is killed while it takes an update: it comes back with nothing of it, and serves again once it has all."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from raw_calls import raw_calls, refused
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.reference.process import ReferenceServer, ServedProcess, reference_command
from skyrl_rollout.tokens import Generation, LogprobMode, Sample, Sampling
from skyrl_rollout.v1 import weights_pb2
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher
from tcp_proxy import TcpProxy
from test_publisher import served, weights

pytestmark = pytest.mark.ci
FAULTY = str(Path(__file__).with_name("faulty_server.py"))
VOCAB = ("--vocab-size", "50000")  # 3.4 MB of weights
CANARY = ("--logits", "canary", *VOCAB)
UPLOAD_BYTES_PER_S, UPLOADED_BYTES = 2e6, 1e6
OLD, NEW = 111, 222  # what the two versions say
PACE_S, MADE = 0.004, 50
DETERMINED = Sampling(max_tokens=40, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def survivor() -> Iterator[ReferenceServer]:
    with ReferenceServer(*CANARY) as process:
        yield process


def command(moment: str, listen: str) -> list[str]:
    """A server that takes its time for what it is killed in."""
    fault = {"seal": "SealsSlowly", "commit": "LoadsSlowly"}.get(moment)
    if fault is None:
        return reference_command(*CANARY, listen=listen)
    return [sys.executable, FAULTY, fault, "--listen", listen, *VOCAB]


class Moment:
    """Returns from `wait` in the middle of an update on the server behind `proxy`."""

    def __init__(self, name: str, proxy: TcpProxy) -> None:
        self._name, self._proxy = name, proxy
        self._sealing = asyncio.Event()
        if name == "upload":
            proxy.bytes_per_s = UPLOAD_BYTES_PER_S
        proxy.when_sent("SealUpdate", self._sealing.set)
        self._before = proxy.bytes_to_server

    async def wait(self, doomed: RolloutClient) -> None:
        if self._name == "upload":
            while self._proxy.bytes_to_server - self._before < UPLOADED_BYTES:
                await asyncio.sleep(0.01)
        elif self._name == "seal":
            await self._sealing.wait()
            await asyncio.sleep(0.2)
        else:
            while (await doomed.status()).state != "committing":
                await asyncio.sleep(0.01)


async def samples_of(pool: RolloutPool, count: int) -> list[Generation]:
    asked = Sampling(max_tokens=3, ignore_eos=True)
    calls = [
        pool.generate([i], asked, mode=LogprobMode.RAW, timeout_s=20, affinity=f"prompt {i} of {count}")
        for i in range(count)
    ]
    return list(await asyncio.gather(*calls))


async def undisturbed(client: RolloutClient, done: asyncio.Event) -> list[Sample]:
    """One request after the other; a failure is raised."""
    asked, paced = Sampling(max_tokens=MADE, ignore_eos=True), {"token_delay_s": PACE_S}
    answers = []
    while not done.is_set():
        made = await client.generate([1], asked, mode=LogprobMode.RAW, timeout_s=10, backend_options=paced)
        assert made.num_restarts == 0
        answers += made.samples
    return answers


async def determined(client: RolloutClient) -> tuple[list[int], bytes]:
    (sample,) = (await client.generate([1], DETERMINED, mode=LogprobMode.RAW, timeout_s=10)).samples
    assert set(sample.weight_versions) == {0}
    return sample.token_ids.tolist(), sample.logprobs.tobytes()


@pytest.mark.parametrize("moment", ["upload", "seal", "commit"])
async def test_it_starts_over_at_version_zero_and_nobody_else_notices(survivor: ReferenceServer, moment: str) -> None:
    publisher = WeightPublisher("inline")
    with ServedProcess(command(moment, "127.0.0.1:0")) as first:
        async with (
            TcpProxy(first.url) as proxy,
            await RolloutClient.connect(first.url) as doomed,
            await RolloutPool.connect([survivor.url, proxy.url]) as pool,
        ):
            as_loaded = await determined(doomed)
            layout, old = doomed.info.model.tensors, pool.highest_version() + 1
            epoch = await pool.acquire_control("trainer")
            targets = [PublishTarget(c.url, epoch) for c in pool.clients]
            await publisher.publish(layout, weights(layout, OLD), targets, target_version=old, timeout_s=30)
            pool.expect(old)

            done = asyncio.Event()
            elsewhere = asyncio.create_task(undisturbed(pool.clients[0], done))
            at = Moment(moment, proxy)
            publishing = asyncio.create_task(
                publisher.publish(layout, weights(layout, NEW), targets, target_version=old + 1, timeout_s=30)
            )
            await at.wait(doomed)
            if moment != "commit":
                assert await served(doomed) == (old, OLD), "the old version was never touched"
            update_id = (await doomed.status()).open_update_id
            first.kill()
            with ServedProcess(command(moment, first.target)) as second:
                report = await publishing
                assert report.committed == (survivor.url,) and list(report.failed) == [proxy.url]
                pool.expect(old + 1)
                proxy.bytes_per_s = None

                async with await RolloutClient.connect(second.url) as reborn, raw_calls(second) as calls:
                    assert second.ready["instance"] != first.ready["instance"]
                    assert reborn.info.weight_version == 0 and (await reborn.status()).open_update_id == ""
                    assert await determined(reborn) == as_loaded, "nothing of any update is left"
                    asked = calls.weights.GetUpdate(weights_pb2.GetUpdateRequest(update_id=update_id), timeout=5)
                    assert update_id and (await refused(asked)).reason == "UNKNOWN_UPDATE"

                    while pool.replicas[1].instance_id != second.ready["instance"]:
                        await asyncio.sleep(0.02)
                    await pool.refresh()
                    assert pool.stale() == (pool.replicas[1],)
                    assert {g.instance_id for g in await samples_of(pool, 8)} == {survivor.ready["instance"]}

                    caught_up = await publisher.catch_up(targets, timeout_s=30)
                    assert (caught_up.kind, len(caught_up.committed)) == ("full", 2)
                    assert caught_up.nbytes >= sum(t.nbytes for t in layout)
                    assert await served(reborn) == (old + 1, NEW)
                    await pool.refresh()
                    assert len({g.instance_id for g in await samples_of(pool, 9)}) == 2

            done.set()
            answers = await elsewhere
            assert {len(a.token_ids) for a in answers} == {MADE}
            assert {int(v) for a in answers for v in a.weight_versions} == {old, old + 1}
            for a in answers:
                np.testing.assert_array_equal(a.token_ids, np.where(a.weight_versions == old, OLD, NEW))
    publisher.close()
