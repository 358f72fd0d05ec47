"""Generate and AbortGenerations against a real server process over a socket."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash
from google.protobuf.duration_pb2 import Duration
from raw_calls import PROMPT, Answer, RawCalls, ask, raw_calls, refused
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer() as process:
        yield process


@pytest.fixture(scope="module")
def slow() -> Iterator[ReferenceServer]:
    """A token every 5 ms."""
    with ReferenceServer("--token-delay-ms", "5", "--max-concurrent", "3") as process:
        yield process


async def until(condition: object, timeout_s: float = 5) -> None:
    end = time.monotonic() + timeout_s
    while not await condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.02)


async def idle(calls: RawCalls) -> bool:
    status = await calls.status()
    return status.running == status.waiting == status.frozen == 0


async def test_the_digest_of_the_prompt_is_that_of_the_bytes_sent(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        answer = await calls.generate(ask())
    assert answer.started is not None
    assert answer.started.prompt_token_digest == xxhash.xxh3_128_digest(PROMPT.tobytes())
    assert answer.started.instance_id == server.ready["instance"]


async def test_every_delta_has_a_logprob_per_token_and_the_next_offset(server: ReferenceServer) -> None:
    request = ask(200, num_samples=3, stream=pb.StreamOptions(min_tokens_per_event=16))
    async with raw_calls(server) as calls:
        answer = await calls.generate(request)
    assert answer.seqs == list(range(1, len(answer.seqs) + 1))
    for sample in range(3):
        offset = 0
        for delta in (d for d in answer.deltas if d.sample_index == sample):
            assert len(delta.token_ids) == len(delta.logprobs) > 0
            assert delta.offset == offset
            offset += len(delta.token_ids) // 4
        assert offset == answer.finished[sample].num_tokens == 200
        ids = np.array(answer.tokens(sample), "<i4").tobytes()
        assert answer.finished[sample].token_digest == xxhash.xxh3_128_digest(ids)
        assert np.isfinite(answer.logprobs(sample)).all()
        assert answer.spans(sample) == [(0, 200, 0, 0)]


async def test_the_stop_token_is_the_last_token_and_is_named(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        free = await calls.generate(ask(50))
        stop = free.tokens()[20]
        answer = await calls.generate(ask(50, sampling={"stop_token_ids": [stop]}))
        ended = await calls.generate(ask(4000, sampling={"ignore_eos": False, "logit_bias": {0: 3.0}}))
    first = free.tokens().index(stop)
    assert answer.tokens() == free.tokens()[: first + 1]
    assert (answer.reason(), answer.finished[0].stop_token_id) == ("STOP_TOKEN", stop)
    assert (ended.reason(), ended.tokens()[-1]) == ("EOS", 0)


async def test_unset_parameters_are_those_of_the_protocol_not_of_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 40, "max_position_embeddings": 100, "eos_token_id": 3})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.8, "eos_token_id": [3, 5]}))
    write_safetensors(tmp_path / "model.safetensors", {"b": (40, 2), "a": (2,)})
    with ReferenceServer("--model", str(tmp_path)) as server:
        async with raw_calls(server) as calls:
            answer = await calls.generate(
                pb.GenerateRequest(request_id="r", prompt_token_ids=PROMPT.tobytes(), num_samples=1)
            )
            info = await calls.engine.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=10)
    assert answer.started is not None
    effective = answer.started.effective
    assert (effective.top_p, effective.temperature, effective.top_k) == (1.0, 1.0, -1)
    assert effective.max_tokens == 100 - len(PROMPT)
    assert all(effective.HasField(f) for f in ("min_p", "min_tokens", "ignore_eos", "seed", "repetition_penalty"))
    assert answer.started.mode == pb.LOGPROB_MODE_SAMPLING
    assert list(info.model.eos_token_ids) == [3, 5]
    assert [t.name for t in info.model.tensors] == ["a", "b"]
    assert info.model.max_context == 100


async def test_temperature_zero_is_greedy(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        one = await calls.generate(ask(sampling={"temperature": 0.0, "seed": 1}))
        two = await calls.generate(ask(sampling={"temperature": 0.0, "seed": 2}))
        other = await calls.generate(ask(sampling={"temperature": 1.0, "seed": 2}))
    assert one.tokens() == two.tokens() != other.tokens()


async def test_max_tokens_beyond_the_context_ends_with_length(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        answer = await calls.generate(ask(10**6))
    assert answer.reason() == "LENGTH"
    assert answer.finished[0].num_tokens == 4096 - len(PROMPT)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_token_ids": b"123"}, "multiple of 4"),
        ({"prompt_token_ids": b""}, "empty"),
        ({"prompt_token_ids": np.array([64], "<i4").tobytes()}, "vocabulary"),
        ({"prompt_token_ids": np.array([-1], "<i4").tobytes()}, "vocabulary"),
        ({"prompt_token_ids": np.zeros(4096, "<i4").tobytes()}, "context"),
        ({"logprobs": pb.LogprobOptions(mode=99)}, "logprobs.mode"),
        ({"version": pb.VersionPolicy(on_commit=9)}, "on_commit"),
        ({"request_id": ""}, "request_id"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
        ({"sampling": {"top_p": 0.0}}, "top_p"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"max_tokens": 0}, "max_tokens": None}, "max_tokens"),
        ({"sampling": {"logit_bias": {99: 1.0}}}, "logit_bias"),
        ({"detach_grace": Duration(seconds=-1)}, "detach_grace"),
        ({"detach_grace": Duration(seconds=3601)}, "detach_grace has 3601 s, at most 3600 are taken"),
        ({"extras": [77]}, "extras"),
        ({"logprobs": pb.LogprobOptions(top_k=65)}, "logprobs.top_k is 65, the limit is 64"),
        ({"logprobs": pb.LogprobOptions(top_k=64), "num_samples": 300, "max_tokens": 4000}, "lower logprobs.top_k"),
        ({"sampling": {"stop_strings": [""]}}, "stop_strings"),
        ({"sampling": {"stop_strings": ["x" * 1025]}}, "stop_strings"),
        ({"sampling": {"stop_strings": ["x"] * 65}}, "stop_strings"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(server: ReferenceServer, change: dict, named: str) -> None:
    async with raw_calls(server) as calls:
        error = await refused(calls.stream(ask(**change)))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.message


async def test_an_unlisted_backend_option_is_refused_and_an_unknown_field_ignored(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        request = ask()
        request.backend_options["spec"] = 1
        error = await refused(calls.stream(request))
        unknown = pb.GenerateRequest.FromString(ask(4).SerializeToString() + b"\xf8\x3e\x01")
        answer = await calls.generate(unknown)
        adapter = await refused(calls.stream(ask(policy_id="lora-1")))
    assert error.details["capability"] == "backend_options"
    assert answer.reason() == "LENGTH"
    assert adapter.code is grpc.StatusCode.NOT_FOUND


async def test_two_calls_with_one_id_share_one_execution(slow: ReferenceServer) -> None:
    request = ask(60, stream=pb.StreamOptions(min_tokens_per_event=8))
    async with raw_calls(slow) as calls:
        before = (await calls.status()).tokens_generated
        one, two = await asyncio.gather(calls.generate(request), calls.generate(request))
        made = (await calls.status()).tokens_generated - before
        again = await calls.generate(request)
    assert one.seqs == two.seqs == again.seqs
    assert one.deltas == two.deltas == again.deltas
    assert made == 60


async def test_an_id_with_other_bytes_is_refused(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        await calls.generate(ask(4, request_id="once"))
        error = await refused(calls.stream(ask(5, request_id="once")))
        beyond = await refused(calls.stream(ask(4, request_id="once", resume_after=99)))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    assert beyond.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_dropped_stream_goes_on_after_the_last_event_seen(slow: ReferenceServer) -> None:
    fields = {"stream": pb.StreamOptions(min_tokens_per_event=4), "detach_grace": Duration(seconds=10)}
    request = ask(60, **fields)
    first = Answer()
    async with raw_calls(slow) as calls:
        call = calls.stream(request)
        while len(first.seqs) < 7:
            first.take(await call.read())
        call.cancel()
        await asyncio.sleep(0.1)
        request.resume_after = 7
        rest = await calls.generate(request)
    assert first.seqs + rest.seqs == list(range(1, rest.seqs[-1] + 1))
    assert len(first.tokens()) + len(rest.tokens()) == 60
    assert rest.deltas[0].offset == len(first.tokens())


async def test_dropping_the_call_without_grace_frees_the_engine(slow: ReferenceServer) -> None:
    async with raw_calls(slow) as calls:
        call = calls.stream(ask(4000))
        await call.read()
        assert (await calls.status()).running == 1
        call.cancel()
        await until(lambda: idle(calls), 2)


async def test_the_grace_ends_the_work_when_nobody_comes_back(slow: ReferenceServer) -> None:
    async with raw_calls(slow) as calls:
        request = ask(4000, detach_grace=Duration(nanos=300_000_000))
        call = calls.stream(request)
        await call.read()
        call.cancel()
        await asyncio.sleep(0.1)
        assert (await calls.status()).running == 1
        await until(lambda: idle(calls), 2)
        late = await calls.generate(request)
    assert late.reason() == "ABORTED"
    assert 0 < len(late.tokens()) == late.finished[0].num_tokens < 4000


async def test_abort_is_a_result_that_keeps_the_tokens(slow: ReferenceServer) -> None:
    async with raw_calls(slow) as calls:
        victim, other = ask(4000, num_samples=2), ask(100)
        tasks = [asyncio.create_task(calls.generate(r)) for r in (victim, other)]
        await asyncio.sleep(0.3)
        abort = pb.AbortGenerationsRequest(request_ids=[victim.request_id, "nobody"])
        reply = await calls.rollout.AbortGenerations(abort, timeout=5)
        aborted, finished = await asyncio.gather(*tasks)
        again = await calls.rollout.AbortGenerations(abort, timeout=5)
    assert (list(reply.aborted), list(reply.not_found)) == ([victim.request_id], ["nobody"])
    assert list(again.not_found) == [victim.request_id, "nobody"]
    for sample in range(2):
        assert aborted.reason(sample) == "ABORTED"
        assert len(aborted.tokens(sample)) == aborted.finished[sample].num_tokens > 0
    assert (finished.reason(), len(finished.tokens())) == ("LENGTH", 100)


async def test_a_passed_deadline_ends_the_work_in_spite_of_its_grace(slow: ReferenceServer) -> None:
    async with raw_calls(slow) as calls:
        error = await refused(calls.stream(ask(4000, detach_grace=Duration(seconds=60)), timeout_s=0.4))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: idle(calls), 2)


async def test_a_seeded_request_repeats_whatever_else_runs(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        alone = await calls.generate(ask(50, num_samples=4))
        crowd = [calls.generate(ask(50, sampling={"seed": i})) for i in range(20)]
        again, *others = await asyncio.gather(calls.generate(ask(50, num_samples=4)), *crowd)
    for sample in range(4):
        assert alone.tokens(sample) == again.tokens(sample)
        assert alone.logprobs(sample).tobytes() == again.logprobs(sample).tobytes()
        # sample i of a request with seed s is sample 0 of one with seed s + i
        assert alone.tokens(sample) == others[7 + sample].tokens()
    assert len({tuple(alone.tokens(s)) for s in range(4)}) == 4


async def test_silence_is_filled_with_heartbeats(slow: ReferenceServer) -> None:
    stream = pb.StreamOptions(final_only=True, heartbeat=Duration(nanos=100_000_000))
    async with raw_calls(slow) as calls:
        answer = await calls.generate(ask(120, stream=stream))
        waiting = calls.stream(ask(stream=stream, version=pb.VersionPolicy(min_weight_version=9)))
        first = await waiting.read()
        waiting.cancel()
    assert len(answer.heartbeats) >= 3
    assert {b.phase for b in answer.heartbeats} == {pb.Heartbeat.PHASE_RUNNING}
    assert answer.heartbeats[-1].tokens_so_far > answer.heartbeats[0].tokens_so_far > 0
    assert len(answer.deltas) == 1
    assert (first.seq, first.heartbeat.phase) == (0, pb.Heartbeat.PHASE_QUEUED)


async def test_few_tokens_are_sent_when_they_have_waited_long_enough(slow: ReferenceServer) -> None:
    stream = pb.StreamOptions(min_tokens_per_event=10_000, max_event_delay=Duration(nanos=50_000_000))
    async with raw_calls(slow) as calls:
        answer = await calls.generate(ask(100, stream=stream))
    assert len(answer.deltas) >= 5


async def test_what_exceeds_the_limit_is_refused_before_it_is_accepted(slow: ReferenceServer) -> None:
    async with raw_calls(slow) as calls:
        await until(lambda: idle(calls))
        streams = [calls.stream(ask(4000)) for _ in range(3)]
        for s in streams:
            await s.read()
        error = await refused(calls.stream(ask()))
        for s in streams:
            s.cancel()
        await until(lambda: idle(calls))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after_s


async def test_a_reader_that_stalls_does_not_hold_up_the_others(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls, raw_calls(server) as others:
        stalled = calls.stream(ask(4000, num_samples=64, stream=pb.StreamOptions(min_tokens_per_event=1)))
        await stalled.read()
        answer = await others.generate(ask(50), timeout_s=5)
        stalled.cancel()
    assert len(answer.tokens()) == 50


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], values: dict[str, np.ndarray] | None = None
) -> None:
    header, data = {}, b""
    for name, shape in shapes.items():
        value = (values or {}).get(name, np.zeros(shape, "<f4")).astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
