"""What is told of a prompt: how much of it the cache held, and how probable its last tokens are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_calls import RawCalls, ask, refused
from raw_updates import commit, draft, staged
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.logits import LogitTable
from skyrl_rollout.reference.prefix_cache import PrefixCache
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.reference.sampling import log_softmax
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.v1 import generation_pb2 as pb

VOCAB = 64
SHORT = Sampling(max_tokens=2, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer() as process:
        yield process


@pytest.fixture
async def client(server: ReferenceServer) -> AsyncIterator[RolloutClient]:
    async with await RolloutClient.connect(server.url) as connected:
        yield connected


async def cached(client: RolloutClient, prompt: np.ndarray, **options: object) -> int:
    generation = await client.generate(prompt, SHORT, mode=LogprobMode.RAW, timeout_s=10, **options)
    return generation.cached_prompt_tokens


def prompt_of(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, n, dtype=np.int32)


async def test_whole_blocks_of_a_prompt_are_found_again_under_the_same_salt_only(client: RolloutClient) -> None:
    prompt = prompt_of(100, 1)
    assert await cached(client, prompt) == 0
    assert await cached(client, prompt) == 96
    assert await cached(client, np.concatenate([prompt[:40], prompt_of(60, 2)])) == 32
    assert await cached(client, prompt, cache_salt="other") == 0
    assert await cached(client, prompt, cache_salt="other") == 96
    assert await cached(client, prompt, bypass_cache=True) == 0
    assert await cached(client, prompt[1:]) == 0


async def test_the_first_request_after_a_commit_finds_nothing_and_says_what_a_cold_server_says(
    calls: RawCalls, client: RolloutClient
) -> None:
    prompt = prompt_of(50, 3)
    before = await client.generate(prompt, SHORT, mode=LogprobMode.RAW, timeout_s=10)
    assert await cached(client, prompt) == 48
    epoch = await calls.epoch()
    update = await staged(calls, epoch, draft(1))
    await commit(calls, epoch, update.update_id, 0)
    after = await client.generate(prompt, SHORT, mode=LogprobMode.RAW, timeout_s=10)
    assert after.cached_prompt_tokens == 0
    assert after.samples[0].weight_versions.tolist() == [1, 1]
    assert after.samples[0].token_ids.tolist() == before.samples[0].token_ids.tolist()
    assert await cached(client, prompt) == 48


@pytest.mark.parametrize("mode", list(LogprobMode))
@pytest.mark.parametrize("last", [1, 7, 30, 1000])
async def test_prompt_logprobs_are_those_of_the_logits_and_unknown_for_the_first_token(
    client: RolloutClient, mode: LogprobMode, last: int
) -> None:
    prompt = prompt_of(30, 4)
    sampling = Sampling(max_tokens=1, temperature=0.5)
    generation = await client.generate(prompt, sampling, mode=mode, timeout_s=10, prompt_last_n=last)
    padded = np.concatenate([np.full(4, -1), prompt])
    logits = LogitTable(0, VOCAB).logits(np.stack([padded[i : i + 4] for i in range(30)]))
    expected = log_softmax(logits / (1.0 if mode is LogprobMode.RAW else 0.5))[np.arange(30), prompt].astype(np.float32)
    expected[0] = np.nan
    assert generation.prompt_logprobs is not None
    np.testing.assert_array_equal(generation.prompt_logprobs, expected[-last:])


async def test_a_prompt_of_one_token_has_one_unknown_logprob(client: RolloutClient) -> None:
    generation = await client.generate([5], SHORT, mode=LogprobMode.RAW, timeout_s=10, prompt_last_n=3)
    assert generation.prompt_logprobs is not None
    assert np.isnan(generation.prompt_logprobs).tolist() == [True]


async def test_prompt_logprobs_of_a_distribution_that_depends_on_the_output_are_refused(calls: RawCalls) -> None:
    error = await refused(calls.stream(ask(sampling={"top_k": 3}, logprobs=pb.LogprobOptions(prompt_last_n=2))))
    assert "ask for RAW or TEMPERATURE" in error.message


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_cache_forgets_what_was_not_used_for_longest_and_never_grows_beyond_its_bound(
    reads: list[tuple[int, int]],
) -> None:
    cache = PrefixCache(max_blocks=6)
    for seed, blocks in reads:
        prompt = prompt_of(blocks * 16 + 3, seed)
        assert cache.read("k", prompt) % 16 == 0
        assert cache.read("k", prompt) == blocks * 16
        assert len(cache) <= 6
    count = len(cache)
    assert cache.drop() == count
    assert cache.read("k", prompt_of(40, reads[-1][0])) == 0
