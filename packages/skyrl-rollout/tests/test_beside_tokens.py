"""Top logprobs and extra outputs: exact, one row per token, cut with the tokens, and never in a message too large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import grpc.aio
import numpy as np
import pytest
from raw_calls import PROMPT, RawCalls, ask
from raw_updates import commit, draft, forcing, staged
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.logits import LogitTable
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.reference.sampling import log_softmax, truncated
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.v1 import generation_pb2 as pb

VOCAB = 64


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer() as process:
        yield process


@pytest.fixture(scope="module")
def canary() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--token-delay-ms", "2") as process:
        yield process


@pytest.fixture
async def client(server: ReferenceServer) -> AsyncIterator[RolloutClient]:
    async with await RolloutClient.connect(server.url) as connected:
        yield connected


def logits_after(prompt: np.ndarray, made: np.ndarray) -> np.ndarray:
    """float64 [n, V]: what the server's seed says at each position."""
    whole = np.concatenate([prompt, made]).astype(np.int64)
    return LogitTable(0, VOCAB).logits(np.stack([whole[i - 4 : i] for i in range(len(prompt), len(whole))]))


@pytest.mark.parametrize("mode", list(LogprobMode))
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
async def test_the_top_of_the_whole_vocabulary_is_log_softmax_of_the_logits(
    client: RolloutClient, mode: LogprobMode, temperature: float
) -> None:
    sampling = Sampling(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)
    generation = await client.generate(PROMPT, sampling, mode=mode, timeout_s=10, top_logprobs=VOCAB)
    (sample,) = generation.samples
    scale = temperature if temperature and mode is not LogprobMode.RAW else 1.0
    expected = log_softmax(logits_after(PROMPT, sample.token_ids) / scale).astype(np.float32)
    assert sample.top is not None
    np.testing.assert_array_equal(np.take_along_axis(expected, sample.top.token_ids, axis=1), sample.top.logprobs)
    assert np.sort(sample.top.token_ids, axis=1).tolist() == [list(range(VOCAB))] * 30
    assert (np.diff(sample.top.logprobs, axis=1) <= 0).all()
    np.testing.assert_array_equal(expected[np.arange(30), sample.token_ids], sample.logprobs)


async def test_the_top_in_sampling_mode_is_what_is_drawn_from(client: RolloutClient) -> None:
    sampling = Sampling(max_tokens=20, temperature=0.5, top_k=3, seed=3, ignore_eos=True)
    generation = await client.generate(
        PROMPT, sampling, mode=LogprobMode.SAMPLING, timeout_s=10, top_logprobs=5, extras=("top_p_token_ids",)
    )
    (sample,) = generation.samples
    logits = logits_after(PROMPT, sample.token_ids)
    assert sample.top is not None
    for i in range(20):
        kept = log_softmax(truncated(logits[i] / 0.5, sampling)).astype(np.float32)
        np.testing.assert_array_equal(kept[sample.top.token_ids[i]], sample.top.logprobs[i])
        assert sample.extras["top_p_token_ids"][i].tolist() == sample.top.token_ids[i, :3].tolist()
    assert np.isneginf(sample.top.logprobs[:, 3:]).all()


async def test_candidates_are_those_of_the_nucleus_and_shorter_rows_are_filled_up(client: RolloutClient) -> None:
    sampling = Sampling(max_tokens=60, top_p=0.6, seed=3, ignore_eos=True)
    generation = await client.generate(
        PROMPT, sampling, mode=LogprobMode.RAW, timeout_s=10, extras=("top_p_token_ids", "routed_experts")
    )
    (sample,) = generation.samples
    rows = sample.extras["top_p_token_ids"]
    assert rows.dtype == np.int32
    for i, logits in enumerate(logits_after(PROMPT, sample.token_ids)):
        candidates = rows[i][rows[i] >= 0]
        assert sorted(candidates) == np.flatnonzero(np.isfinite(truncated(logits, sampling))).tolist()
        assert sample.token_ids[i] in candidates
        assert (rows[i][len(candidates) :] == -1).all()
    assert len({(row >= 0).sum() for row in rows}) > 1
    assert (sample.extras["routed_experts"].shape, sample.extras["routed_experts"].dtype) == ((60, 2, 2), np.int16)


async def test_experts_follow_token_and_position_only(client: RolloutClient) -> None:
    asked = {"mode": LogprobMode.RAW, "timeout_s": 10, "extras": ("routed_experts",)}
    greedy = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    whole = (await client.generate(PROMPT, greedy, **asked)).samples[0]
    moved = np.concatenate([PROMPT, whole.token_ids[:15]])
    rest = (await client.generate(moved, replace(greedy, max_tokens=25), **asked)).samples[0]
    experts = whole.extras["routed_experts"]
    assert experts[15:].tolist() == rest.extras["routed_experts"].tolist()
    assert (experts >= 0).all() and (experts < 8).all() and (experts[..., 0] != experts[..., 1]).all()


async def test_what_travels_beside_the_tokens_is_cut_at_a_commit(canary: ReferenceServer) -> None:
    async with grpc.aio.insecure_channel(canary.target) as channel:
        calls = RawCalls(channel)
        epoch = await calls.epoch()
        request = ask(
            150, logprobs=pb.LogprobOptions(mode=pb.LOGPROB_MODE_RAW, top_k=2), extras=[pb.EXTRA_ROUTED_EXPERTS],
            stream=pb.StreamOptions(final_only=True),
        )  # fmt: skip
        running = asyncio.create_task(calls.generate(request))
        await asyncio.sleep(0.1)
        update = await staged(calls, epoch, draft(1, forcing(9)))
        await commit(calls, epoch, update.update_id, 0)
        answer = await running
    assert [d.weight_version for d in answer.deltas] == [0, 1]
    for delta in answer.deltas:
        n = len(delta.token_ids) // 4
        assert len(delta.top.token_ids) == len(delta.top.logprobs) == 8 * n
        assert list(delta.extras["routed_experts"].shape) == [n, 2, 2]
    new = answer.deltas[1]
    assert np.frombuffer(new.top.token_ids, "<i4").reshape(-1, 2)[:, 0].tolist() == [9] * (len(new.token_ids) // 4)


async def test_a_long_answer_with_everything_beside_it_stays_below_the_message_limit() -> None:
    request = ask(
        2000, logprobs=pb.LogprobOptions(top_k=20), extras=[pb.EXTRA_ROUTED_EXPERTS],
        stream=pb.StreamOptions(final_only=True),
    )  # fmt: skip
    tokens, rows, sizes = 0, 0, []
    with ReferenceServer("--max-message-bytes", "131072") as small:
        async with grpc.aio.insecure_channel(small.target) as channel:
            async for m in RawCalls(channel).stream(request):
                sizes.append(m.ByteSize())
                tokens += len(m.delta.token_ids) // 4
                rows += len(m.delta.top.logprobs) // 80
    assert tokens == rows == 2000
    assert max(sizes) < 131072 < sum(sizes)
