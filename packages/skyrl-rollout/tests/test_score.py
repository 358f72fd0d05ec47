"""Score against a real server: exact logprobs, one version per answer, admitted and bounded like a generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest
from raw_calls import PROMPT, RawCalls, ask, fence, raw_calls, refused
from raw_updates import commit, draft, forcing, staged
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import CorruptBytes, DeadlineExceeded, InvalidRequest, UnknownPolicy
from skyrl_rollout.reference.logits import LogitTable
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.reference.sampling import log_softmax
from skyrl_rollout.scoring import scores_from_pb
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb

VOCAB, CONTEXT = 64, 4096
RAW = LogprobMode.RAW
TOKENS = np.random.default_rng(0).integers(0, VOCAB, CONTEXT, dtype=np.int32)


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--max-message-bytes", "65536", "--max-concurrent", "3") as process:
        yield process


@pytest.fixture
async def client(server: ReferenceServer) -> AsyncIterator[RolloutClient]:
    async with await RolloutClient.connect(server.url) as connected:
        yield connected


def asked(tokens: np.ndarray = TOKENS, score_from: int = 1, **fields: object) -> pb.ScoreRequest:
    return pb.ScoreRequest(request_id="s", token_ids=tokens.tobytes(), score_from=score_from, **fields)


@pytest.mark.parametrize("mode", list(LogprobMode))
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
async def test_scores_are_log_softmax_of_the_logits(mode: LogprobMode, temperature: float) -> None:
    with ReferenceServer("--seed", "5") as plain:
        async with await RolloutClient.connect(plain.url) as client:
            scores = await client.score(
                TOKENS[:200], 3, mode=mode, temperature=temperature, top_logprobs=VOCAB, timeout_s=10
            )
    padded = np.concatenate([np.full(4, -1), TOKENS[:200]])
    logits = LogitTable(5, VOCAB).logits(np.stack([padded[i : i + 4] for i in range(3, 200)]))
    scale = temperature if temperature and mode is not RAW else 1.0
    expected = log_softmax(logits / scale).astype(np.float32)
    np.testing.assert_array_equal(scores.logprobs, expected[np.arange(197), TOKENS[3:200]])
    assert scores.top is not None
    np.testing.assert_array_equal(np.take_along_axis(expected, scores.top.token_ids, axis=1), scores.top.logprobs)
    assert (scores.weight_version, scores.mode) == (0, mode)


async def test_what_was_generated_scores_as_it_was_drawn(client: RolloutClient) -> None:
    sampling = Sampling(max_tokens=50, temperature=0.5, seed=3, ignore_eos=True)
    (sample,) = (await client.generate(PROMPT, sampling, mode=LogprobMode.TEMPERATURE, timeout_s=10)).samples
    whole = np.concatenate([PROMPT, sample.token_ids])
    scores = await client.score(whole, len(PROMPT), mode=LogprobMode.TEMPERATURE, temperature=0.5, timeout_s=10)
    np.testing.assert_array_equal(scores.logprobs, sample.logprobs)


async def test_a_long_answer_comes_in_pieces_below_the_message_limit(calls: RawCalls) -> None:
    request = asked(logprobs=pb.LogprobOptions(mode=pb.LOGPROB_MODE_RAW, top_k=20))
    responses = [m async for m in calls.rollout.Score(request, timeout=20)]
    assert len(responses) > 10
    assert max(m.ByteSize() for m in responses) < 65536
    scores = scores_from_pb(request, responses, RAW)
    assert len(scores.logprobs) == CONTEXT - 1
    with pytest.raises(CorruptBytes, match="was next"):
        scores_from_pb(request, responses[1:], RAW)
    with pytest.raises(CorruptBytes, match="were scored"):
        scores_from_pb(request, responses[:-1], RAW)
    responses[1].weight_version = 7
    with pytest.raises(CorruptBytes, match="under"):
        scores_from_pb(request, responses, RAW)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (asked(TOKENS[:0]), "empty"),
        (asked(np.array([1, 64], np.int32)), "vocabulary"),
        (asked(np.zeros(CONTEXT + 1, np.int32)), "context"),
        (asked(score_from=0), "nothing precedes token 0"),
        (asked(score_from=CONTEXT), "score_from is 4096"),
        (asked(temperature=-1.0), "temperature"),
        (asked(temperature=float("nan")), "temperature"),
        (asked(logprobs=pb.LogprobOptions(mode=9)), "logprobs.mode"),
        (asked(logprobs=pb.LogprobOptions(top_k=65)), "logprobs.top_k is 65"),
        (asked(logprobs=pb.LogprobOptions(prompt_last_n=3)), "prompt_last_n"),
        (asked(version=pb.VersionPolicy(on_commit=9)), "on_commit"),
        (pb.ScoreRequest(token_ids=b"123", score_from=1), "multiple of 4"),
        (pb.ScoreRequest(request_id="x" * 201, token_ids=TOKENS.tobytes(), score_from=1), "request_id"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(calls: RawCalls, request_: pb.ScoreRequest, named: str) -> None:
    error = await refused(calls.rollout.Score(request_, timeout=10))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.message


async def test_an_unknown_field_is_ignored_and_an_unknown_policy_is_not_the_base(
    calls: RawCalls, client: RolloutClient
) -> None:
    unknown = pb.ScoreRequest.FromString(asked(TOKENS[:9]).SerializeToString() + b"\xf8\x3e\x01")
    assert [m.offset async for m in calls.rollout.Score(unknown, timeout=10)] == [1]
    with pytest.raises(UnknownPolicy):
        await client.score(TOKENS[:9], 1, mode=RAW, timeout_s=5, policy_id="lora")
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await client.score([1, 99], 1, mode=RAW, timeout_s=5)
    with pytest.raises(ValueError, match="score_from is 2, expected 1 to 1"):
        await client.score([1, 2], 2, mode=RAW, timeout_s=5)


async def test_a_score_waits_for_its_version_or_its_deadline(calls: RawCalls, client: RolloutClient) -> None:
    current = (await client.refresh()).weight_version
    with pytest.raises(DeadlineExceeded):
        await client.score(TOKENS[:9], 1, mode=RAW, timeout_s=0.3, min_weight_version=current + 1)
    epoch = await calls.epoch()
    before = await client.score(TOKENS[:9], 1, mode=RAW, timeout_s=5)
    waits = asyncio.create_task(client.score(TOKENS[:9], 1, mode=RAW, timeout_s=10, min_weight_version=current + 1))
    update = await staged(calls, epoch, draft(current + 1, forcing(9)))
    assert not waits.done()
    await commit(calls, epoch, update.update_id, current)
    after = await waits
    assert (before.weight_version, after.weight_version) == (current, current + 1)
    assert before.logprobs.tolist() != after.logprobs.tolist()


async def test_a_score_waits_while_the_server_is_paused(calls: RawCalls, client: RolloutClient) -> None:
    epoch = await calls.epoch()
    pause = control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP)
    paused = await calls.engine.Pause(pause, timeout=5)
    waits = asyncio.create_task(client.score(TOKENS[:9], 1, mode=RAW, timeout_s=10))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waits), 0.2)
    resume = control_pb2.ResumeRequest(fence=fence(epoch), pause_id=paused.pause_id)
    await calls.engine.Resume(resume, timeout=5)
    assert len((await waits).logprobs) == 8


async def test_scores_during_commits_are_each_of_one_version(calls: RawCalls, client: RolloutClient) -> None:
    """Every version forces another token, so logprobs of two versions in one answer would show."""
    epoch, first = await calls.epoch(), (await client.refresh()).weight_version
    by_version: dict[int, set[bytes]] = {}
    stop = False

    async def keep_scoring() -> None:
        while not stop:
            scores = await client.score(TOKENS, 1, mode=RAW, timeout_s=20)
            by_version.setdefault(scores.weight_version, set()).add(scores.logprobs.tobytes())

    scoring = [asyncio.create_task(keep_scoring()) for _ in range(2)]
    for version in range(first + 1, first + 7):
        update = await staged(calls, epoch, draft(version, forcing(version)))
        await commit(calls, epoch, update.update_id, version - 1)
    stop = True
    await asyncio.gather(*scoring)
    assert len(by_version) > 2
    assert {len(answers) for answers in by_version.values()} == {1}
    assert len({next(iter(answers)) for answers in by_version.values()}) == len(by_version)


async def test_scores_count_against_the_limit_and_free_their_place(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        ahead = pb.VersionPolicy(min_weight_version=10**6)
        waiting = [calls.rollout.Score(asked(TOKENS[:9], version=ahead), timeout=10) for _ in range(3)]
        tasks = [asyncio.create_task(w.read()) for w in waiting]
        wrong = ask(sampling={"temperature": -1.0})  # takes no place itself
        while (error := await refused(calls.stream(wrong))).code is grpc.StatusCode.INVALID_ARGUMENT:
            await asyncio.sleep(0.02)
        assert error.retry_after_s
        assert (await refused(calls.rollout.Score(asked(TOKENS[:9]), timeout=5))).reason == "OVERLOADED"
        for w in waiting:
            w.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with await RolloutClient.connect(server.url) as client:
            assert len((await client.score(TOKENS[:9], 1, mode=RAW, timeout_s=10)).logprobs) == 8


async def test_a_score_that_waits_is_told_when_the_server_shuts_down() -> None:
    with ReferenceServer() as leaving:
        async with raw_calls(leaving) as calls:
            ahead = pb.VersionPolicy(min_weight_version=1)
            waiting = asyncio.create_task(refused(calls.rollout.Score(asked(TOKENS[:9], version=ahead), timeout=20)))
            await asyncio.sleep(0.2)
            assert await asyncio.to_thread(leaving.stop) == 0
            assert (await waiting).reason == "DRAINING"
