"""Stop strings, priority, pace and aborts by id: what a request may ask of how it is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct
from raw_calls import RawCalls, ask, raw_calls, refused
from raw_updates import commit, draft, staged
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.reference.rows import text_of
from skyrl_rollout.requests import GenerateOptions
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling
from skyrl_rollout.v1 import generation_pb2 as pb

RAW = LogprobMode.RAW


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary") as process:
        yield process


@pytest.fixture
async def client(server: ReferenceServer) -> AsyncIterator[RolloutClient]:
    async with await RolloutClient.connect(server.url) as connected:
        yield connected


def paced(delay_s: object) -> Struct:
    option = Struct()
    option.update({"token_delay_s": delay_s})
    return option


@pytest.mark.parametrize("per_event", [1, 3, 64])
async def test_a_stop_string_is_found_over_several_deltas_and_no_token_follows_it(
    calls: RawCalls, per_event: int
) -> None:
    free = await calls.generate(ask(60))
    text = "".join(map(text_of, free.tokens()))
    stop, stream = text[20:25], pb.StreamOptions(min_tokens_per_event=per_event)
    answer = await calls.generate(ask(60, sampling={"stop_strings": ["\n", stop]}, stream=stream))
    end = text.index(stop) + len(stop)
    assert answer.tokens() == free.tokens()[:end]
    assert (answer.reason(), answer.finished[0].stop_string) == ("STOP_STRING", stop)
    assert answer.finished[0].num_tokens == end
    later = await calls.generate(ask(60, sampling={"stop_strings": [stop], "min_tokens": end + 1}))
    assert (later.reason(), later.tokens()) == ("LENGTH", free.tokens())


async def test_a_stop_string_in_the_prompt_or_over_its_end_does_not_count(client: RolloutClient) -> None:
    sampling = Sampling(max_tokens=20, seed=7, ignore_eos=True)
    (free,) = (await client.generate([1, 2, 3], sampling, mode=RAW, timeout_s=10)).samples
    stop = text_of(3) + text_of(int(free.token_ids[0]))
    options = GenerateOptions(num_samples=1)
    sampling = Sampling(max_tokens=20, seed=7, ignore_eos=True, stop_strings=(text_of(2) + text_of(3), stop))
    (sample,) = (await client.generate([1, 2, 3], sampling, options, mode=RAW, timeout_s=10)).samples
    assert sample.finish_reason is not FinishReason.STOP_STRING or len(sample.token_ids) > 1


async def test_of_those_that_wait_the_higher_priority_goes_first_and_equals_in_their_order() -> None:
    with ReferenceServer("--max-running", "1") as narrow:
        async with raw_calls(narrow) as calls:
            running = calls.stream(ask(4000, backend_options=paced(0.01)))
            while (await running.read()).WhichOneof("event") != "delta":
                pass
            ended: list[str] = []

            async def wait_for(name: str, priority: int) -> None:
                await calls.generate(ask(3, request_id=name, priority=priority))
                ended.append(name)

            tasks = []
            for name, priority in (("low", -1), ("first", 0), ("high", 5), ("second", 0)):
                tasks.append(asyncio.create_task(wait_for(name, priority)))
                while (await calls.status()).running < len(tasks) + 1:
                    await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(*tasks)
    assert ended == ["high", "first", "second", "low"]


async def test_a_request_chooses_its_own_pace_beside_others(calls: RawCalls) -> None:
    began = time.monotonic()
    slow = asyncio.create_task(calls.generate(ask(11, backend_options=paced(0.05))))
    quick = await calls.generate(ask(11))
    assert not slow.done()
    answer = await slow
    assert time.monotonic() - began > 0.4
    assert answer.tokens() == quick.tokens()


@pytest.mark.parametrize("delay", [-1, 11, "soon", float("nan")])
async def test_a_pace_that_is_none_is_refused(calls: RawCalls, delay: object) -> None:
    error = await refused(calls.stream(ask(backend_options=paced(delay))))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "token_delay_s" in error.message or "cannot be read as JSON" in error.message


async def test_an_abort_ends_one_id_and_none_that_shares_its_prefix_or_its_prompt(calls: RawCalls) -> None:
    ids = ["job", "job-1", "job-12", "jo"]
    tasks = {i: asyncio.create_task(calls.generate(ask(60, request_id=i, backend_options=paced(0.005)))) for i in ids}
    while (await calls.status()).running < 4:
        await asyncio.sleep(0.01)
    reply = await calls.rollout.AbortGenerations(pb.AbortGenerationsRequest(request_ids=["job-1", "job-1"]), timeout=5)
    answers = dict(zip(ids, await asyncio.gather(*tasks.values()), strict=True))
    assert (list(reply.aborted), list(reply.not_found)) == (["job-1"], [])
    assert {i: a.reason() for i, a in answers.items()} == {
        "job": "LENGTH", "job-1": "ABORTED", "job-12": "LENGTH", "jo": "LENGTH",
    }  # fmt: skip
    assert answers["job"].tokens() == answers["jo"].tokens()


async def test_everything_is_aborted_at_once_queued_or_running(calls: RawCalls, client: RolloutClient) -> None:
    ahead = pb.VersionPolicy(min_weight_version=10**6)
    requests = [ask(2000, backend_options=paced(0.01)), ask(2000, backend_options=paced(0.01)), ask(version=ahead)]
    tasks = [asyncio.create_task(calls.generate(r)) for r in requests]
    while (await calls.status()).running + (await calls.status()).waiting < 3:
        await asyncio.sleep(0.01)
    aborted, unknown = await client.abort(everything=True)
    answers = await asyncio.gather(*tasks)
    assert (set(aborted), unknown) == ({r.request_id for r in requests}, [])
    assert [a.reason() for a in answers] == ["ABORTED"] * 3
    assert all(a.started is not None for a in answers)
    assert await client.abort(everything=True) == ([], [])


async def test_weights_that_are_not_numbers_make_logprobs_unknown_and_tokens_flow(calls: RawCalls) -> None:
    epoch, values = await calls.epoch(), np.zeros(64, "<f4")
    current = (await calls.status()).weight_versions[""]
    values[5] = np.nan
    update = await staged(calls, epoch, draft(current + 1, {"canary.weight": values}))
    await commit(calls, epoch, update.update_id, current)
    broken = await calls.generate(ask(20, logprobs=pb.LogprobOptions(top_k=2, prompt_last_n=3)))
    update = await staged(calls, epoch, draft(current + 2))
    await commit(calls, epoch, update.update_id, current + 1)
    healed = await calls.generate(ask(20))
    assert len(broken.tokens()) == broken.finished[0].invalid_logprobs == 20
    assert np.isnan(broken.logprobs()).all()
    assert broken.started is not None
    assert np.isnan(np.frombuffer(broken.started.prompt_logprobs, "<f4")).all()
    assert (healed.finished[0].invalid_logprobs, np.isfinite(healed.logprobs()).all()) == (0, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on_commit": "wait"}, "on_commit is one of"),
        ({"num_samples": 0}, "num_samples is at least 1"),
        ({"top_logprobs": -1}, "top_logprobs is at least 0"),
        ({"extras": ("logits",)}, "extras are some of"),
    ],
)
async def test_options_that_are_none_are_refused_where_they_are_made(
    client: RolloutClient, change: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GenerateOptions(**change)
    with pytest.raises(ValueError, match=message):
        await client.generate([1], Sampling(), mode=RAW, timeout_s=5, **change)
    with pytest.raises(TypeError, match="num_sampels"):
        await client.generate([1], Sampling(), mode=RAW, timeout_s=5, num_sampels=2)
