"""An update that was a mistake: its tokens still flow and say what they are worth, and older content heals it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from skyrl_rollout.errors import VersionConflict
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sample, Sampling
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher

ASKED = Sampling(max_tokens=50, seed=9, ignore_eos=True)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ReferenceServer]]:
    with ReferenceServer("--logits", "canary") as one, ReferenceServer("--logits", "canary") as two:
        yield [one, two]


class Trainer:
    """Publishes a canary to every replica, each time as the next version."""

    def __init__(self, pool: RolloutPool, epoch: int) -> None:
        self.pool, self.publisher = pool, WeightPublisher()
        self._targets = [PublishTarget(c.url, epoch) for c in pool.clients]

    async def publish(self, canary: np.ndarray, version: int | None = None) -> int:
        layout = self.pool.clients[0].info.model.tensors
        await self.pool.refresh()
        version = version or self.pool.highest_version() + 1
        tensors = [(t.name, memoryview(canary if t.name == "canary.weight" else bytes(t.nbytes))) for t in layout]
        report = await self.publisher.publish(layout, tensors, self._targets, target_version=version, timeout_s=20)
        assert len(report.committed) == 2
        return version

    async def samples(self) -> list[Sample]:
        """Two from every replica, greedy and drawn."""
        calls = [
            c.generate([1, 2], s, mode=LogprobMode.RAW, timeout_s=20)
            for c in self.pool.clients
            for s in (ASKED, Sampling(max_tokens=50, temperature=0.0, ignore_eos=True))
        ]
        return [g.samples[0] for g in await asyncio.gather(*calls)]


@pytest.fixture
async def trainer(servers: list[ReferenceServer]) -> AsyncIterator[Trainer]:
    async with await RolloutPool.connect([s.url for s in servers]) as pool:
        made = Trainer(pool, await pool.acquire_control("trainer"))
        yield made
        made.publisher.close()


def canary(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(64).astype("<f4")


def bits(samples: list[Sample]) -> list[tuple[list[int], bytes]]:
    return [(s.token_ids.tolist(), s.logprobs.tobytes()) for s in samples]


async def test_not_a_number_is_counted_while_tokens_flow_and_older_content_under_a_higher_version_heals(
    trainer: Trainer,
) -> None:
    await trainer.publish(good := canary(1))
    before = await trainer.samples()
    broken = good.copy()
    broken[7] = np.nan
    bad_version = await trainer.publish(broken)
    for sample in await trainer.samples():
        assert len(sample.token_ids) == len(sample.logprobs) == sample.invalid_logprobs == 50
        assert np.isnan(sample.logprobs).all() and set(sample.weight_versions) == {bad_version}
    healed_version = await trainer.publish(good)
    healed = await trainer.samples()
    assert healed_version == bad_version + 1 and bits(healed) == bits(before)
    assert {s.invalid_logprobs for s in healed} == {0}
    assert {int(v) for s in healed for v in s.weight_versions} == {healed_version}


async def test_a_rollback_is_the_old_bytes_under_the_next_version_and_their_old_output_to_the_last_bit(
    trainer: Trainer,
) -> None:
    first = await trainer.publish(old := canary(2))
    before = await trainer.samples()
    second = await trainer.publish(canary(3))
    assert bits(await trainer.samples()) != bits(before)
    for lower in (first, second):
        with pytest.raises(VersionConflict, match=f"serves version {second}, and versions only grow"):
            await trainer.publish(old, lower)
    third = await trainer.publish(old)
    after = await trainer.samples()
    assert bits(after) == bits(before) and third == second + 1
    assert {int(v) for s in after for v in s.weight_versions} == {third}
