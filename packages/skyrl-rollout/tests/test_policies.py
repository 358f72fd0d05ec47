"""Requests of an adapter beside requests of the base: their own logprobs, scores, cache and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from raw_calls import RawCalls
from raw_updates import adapter_draft, draft, published, version
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import UnknownPolicy
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling

RAW = LogprobMode.RAW
SHORT = Sampling(max_tokens=8, seed=4, ignore_eos=True)
PROMPT = np.random.default_rng(1).integers(1, 64, 40, dtype=np.int32)


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary") as process:
        yield process


@pytest.fixture
async def client(server: ReferenceServer) -> AsyncIterator[RolloutClient]:
    async with await RolloutClient.connect(server.url) as connected:
        yield connected


async def test_what_an_adapter_says_scores_under_the_adapter_and_not_under_the_base(
    calls: RawCalls, epoch: int, client: RolloutClient
) -> None:
    await published(calls, epoch, adapter_draft("red", 3, 17))
    asked = {"mode": RAW, "timeout_s": 10, "policy_id": "red"}
    generation = await client.generate(PROMPT, SHORT, top_logprobs=2, prompt_last_n=5, **asked)
    (sample,) = generation.samples
    whole = np.concatenate([PROMPT, sample.token_ids])
    scores = await client.score(whole, 35, top_logprobs=2, **asked)
    base = await client.score(whole, 35, mode=RAW, timeout_s=10)
    assert sample.token_ids.tolist() == [17] * 8
    assert (scores.weight_version, base.weight_version) == (3, 0)
    assert generation.prompt_logprobs is not None
    np.testing.assert_array_equal(scores.logprobs, np.concatenate([generation.prompt_logprobs, sample.logprobs]))
    assert scores.top is not None and sample.top is not None
    np.testing.assert_array_equal(scores.top.token_ids[5:], sample.top.token_ids)
    assert scores.logprobs[5:].min() > -0.1 > base.logprobs[5:].max()


async def test_no_policy_and_no_version_finds_the_cached_blocks_of_another(
    calls: RawCalls, epoch: int, client: RolloutClient
) -> None:
    async def cached(policy_id: str) -> int:
        return (await client.generate(PROMPT, SHORT, mode=RAW, timeout_s=10, policy_id=policy_id)).cached_prompt_tokens

    await published(calls, epoch, draft(await version(calls) + 1))
    await published(calls, epoch, adapter_draft("blue", 1, 18))
    assert (await cached(""), await cached("blue"), await cached("")) == (0, 0, 32)
    await published(calls, epoch, adapter_draft("blue", 2, 19))
    assert (await cached("blue"), await cached("blue")) == (0, 32)
    await published(calls, epoch, draft(await version(calls) + 1))
    await published(calls, epoch, adapter_draft("blue", 3, 19))
    assert (await cached("blue"), await cached("")) == (0, 0)


async def test_scores_and_requests_that_wait_for_an_adapter_are_told_when_it_is_dropped(
    calls: RawCalls, epoch: int, client: RolloutClient
) -> None:
    await published(calls, epoch, adapter_draft("green", 1, 20))
    ahead = {"mode": RAW, "timeout_s": 10, "policy_id": "green", "min_weight_version": 2}
    waiting = [
        asyncio.create_task(client.generate(PROMPT, SHORT, **ahead)),
        asyncio.create_task(client.score(PROMPT, 1, **ahead)),
    ]
    while (await calls.status()).waiting < 1:
        await asyncio.sleep(0.01)
    await published(calls, epoch, draft(await version(calls) + 1))
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, UnknownPolicy)
