"""Pauses and commits while requests run: what becomes of the work, and which version made which token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from raw_calls import Answer, RawCalls, ask, fence, raw_calls, refused
from raw_updates import commit, draft, forcing, published, staged, state, version
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2, weights_pb2
from skyrl_rollout.v1 import generation_pb2 as pb

ABORT, WAIT, KEEP = control_pb2.PAUSE_MODE_ABORT, control_pb2.PAUSE_MODE_WAIT, control_pb2.PAUSE_MODE_KEEP


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    """A token every 5 ms, and weights that are visible in what is said."""
    with ReferenceServer("--logits", "canary", "--token-delay-ms", "5") as process:
        yield process


async def pause(
    calls: RawCalls, epoch: int, mode: int, timeout_s: float = 10, **fields: object
) -> control_pb2.PauseResponse:
    request = control_pb2.PauseRequest(**({"fence": fence(epoch), "mode": mode} | fields))
    return await calls.engine.Pause(request, timeout=timeout_s)


async def resume(calls: RawCalls, epoch: int, pause_id: str) -> control_pb2.ResumeResponse:
    return await calls.engine.Resume(control_pb2.ResumeRequest(fence=fence(epoch), pause_id=pause_id), timeout=10)


async def running(calls: RawCalls, request: pb.GenerateRequest) -> asyncio.Task[Answer]:
    """Starts the request and returns when its first tokens are made."""
    task = asyncio.create_task(calls.generate(request))
    before = (await calls.status()).tokens_generated
    while (await calls.status()).tokens_generated < before + 5:
        await asyncio.sleep(0.01)
    return task


async def test_keep_freezes_between_two_tokens_and_goes_on_as_if_nothing_happened(calls: RawCalls, epoch: int) -> None:
    undisturbed = await calls.generate(ask(60))
    task = await running(calls, ask(60, stream=pb.StreamOptions(heartbeat=Duration(nanos=100_000_000))))
    paused = await pause(calls, epoch, KEEP)
    first = await calls.status()
    await asyncio.sleep(0.3)
    second = await calls.status()
    await resume(calls, epoch, paused.pause_id)
    answer = await task
    assert (paused.frozen, paused.aborted) == (1, 0)
    assert first.state == second.state == control_pb2.ENGINE_STATE_PAUSED
    assert (first.tokens_generated, first.step_counter) == (second.tokens_generated, second.step_counter)
    assert (second.running, second.frozen) == (0, 1)
    assert answer.tokens() == undisturbed.tokens()
    assert pb.Heartbeat.PHASE_PAUSED in {b.phase for b in answer.heartbeats}


async def test_a_commit_while_a_request_runs_says_exactly_where_the_versions_meet(calls: RawCalls, epoch: int) -> None:
    old = await version(calls)
    await published(calls, epoch, draft(old + 1, forcing(11)))
    d = await staged(calls, epoch, draft(old + 2, forcing(12)))
    for mode, kv, oldest in ((KEEP, control_pb2.KV_POLICY_RETAIN, old + 1), (KEEP, 0, old + 3)):
        task = await running(calls, ask(60))
        now = await version(calls)
        reply = await commit(calls, epoch, d.update_id, now, mode=mode, kv=kv)
        answer = await task
        tokens, (first, second) = answer.tokens(), answer.spans()
        cut = first[1]
        assert (reply.frozen, reply.aborted, reply.weight_version) == (1, 0, now + 1)
        assert first == (0, cut, now, now)
        assert second == (cut, 60 - cut, now + 1, oldest)
        assert tokens == [10 + now - old] * cut + [11 + now - old] * (60 - cut)
        for delta in answer.deltas:
            inside = {
                v
                for s, n, v, _ in answer.spans()
                for t in range(s, s + n)
                if delta.offset <= t < delta.offset + len(delta.token_ids) // 4
            }
            assert inside == {delta.weight_version}
        d = await staged(calls, epoch, draft(now + 2, forcing(13)))


async def test_the_cut_is_exact_when_the_reader_is_slow(calls: RawCalls, server: ReferenceServer, epoch: int) -> None:
    now = await version(calls)
    await published(calls, epoch, draft(now + 1, forcing(21)))
    d = await staged(calls, epoch, draft(now + 2, forcing(22)))
    async with raw_calls(server) as slow:
        stream = slow.stream(ask(80, num_samples=8, stream=pb.StreamOptions(min_tokens_per_event=1)))
        answer = Answer()
        answer.take(await stream.read())
        await asyncio.sleep(0.15)
        await commit(calls, epoch, d.update_id, now + 1)
        await asyncio.sleep(0.6)
        while (m := await stream.read()) is not grpc.aio.EOF:
            answer.take(m)
    for sample in range(8):
        (_, cut, _, _), _ = answer.spans(sample)
        assert answer.tokens(sample) == [21] * cut + [22] * (80 - cut)


async def test_wait_lets_running_work_finish_and_queues_the_rest(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = await staged(calls, epoch, draft(now + 1, forcing(30)))
    first = await running(calls, ask(60))
    committing = asyncio.create_task(commit(calls, epoch, d.update_id, now, mode=WAIT))
    await asyncio.sleep(0.05)
    queued = asyncio.create_task(calls.generate(ask(5)))
    old = await first
    reply, new = await committing, await queued
    assert [s[2] for s in old.spans()] == [now]
    assert len(old.tokens()) == 60
    assert (reply.frozen, reply.aborted) == (0, 0)
    assert new.tokens() == [30] * 5
    assert [s[2] for s in new.spans()] == [now + 1]


async def test_a_pause_that_waits_too_long_gives_up_and_the_server_serves_on(calls: RawCalls, epoch: int) -> None:
    task = await running(calls, ask(150))
    error = await refused(pause(calls, epoch, WAIT, timeout_s=0.2))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.sleep(0.1)
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_SERVING
    assert len((await calls.generate(ask(3))).tokens()) == 3
    assert len((await task).tokens()) == 150


async def test_a_commit_that_waits_too_long_changes_nothing_and_may_be_made_another_way(
    calls: RawCalls, epoch: int
) -> None:
    now = await version(calls)
    await published(calls, epoch, draft(now + 1, forcing(40)))
    d = await staged(calls, epoch, draft(now + 2, forcing(41)))
    straggler = await running(calls, ask(300))
    late = weights_pb2.CommitUpdateRequest(
        fence=fence(epoch), update_id=d.update_id, expected_version=now + 1, mode=WAIT
    )
    error = await refused(calls.weights.CommitUpdate(late, timeout=0.2))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.sleep(0.1)
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_SERVING
    assert (await state(calls, d.update_id), await version(calls)) == ("SEALED", now + 1)
    assert (await calls.generate(ask(3))).tokens() == [40] * 3
    reply = await commit(calls, epoch, d.update_id, now + 1, mode=KEEP)
    assert (reply.frozen, reply.weight_version) == (1, now + 2)
    answer = await straggler
    (_, cut, _, _), (_, rest, _, _) = answer.spans()
    assert answer.tokens() == [40] * cut + [41] * rest and cut + rest == 300


async def test_abort_ends_work_with_its_tokens_and_resubmitting_continues(calls: RawCalls, epoch: int) -> None:
    whole = await calls.generate(ask(40, sampling={"temperature": 0.0}))
    task = await running(calls, ask(40, sampling={"temperature": 0.0}))
    paused = await pause(calls, epoch, ABORT)
    part = await task
    await resume(calls, epoch, paused.pause_id)
    assert (paused.aborted, paused.frozen) == (1, 0)
    assert part.reason() == "PAUSED"
    made = part.tokens()
    assert 0 < len(made) < 40
    assert made == whole.tokens()[: len(made)]
    prompt = np.concatenate([np.arange(1, 9), made]).astype("<i4").tobytes()
    rest = await calls.generate(ask(40 - len(made), prompt_token_ids=prompt, sampling={"temperature": 0.0}))
    assert made + rest.tokens() == whole.tokens()


async def test_a_request_that_must_not_mix_versions_ends_at_the_commit(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = await staged(calls, epoch, draft(now + 1, forcing(5)))
    stops = pb.VersionPolicy(on_commit=pb.VersionPolicy.ON_COMMIT_STOP)
    task = await running(calls, ask(200, version=stops, num_samples=2))
    reply = await commit(calls, epoch, d.update_id, now)
    answer = await task
    assert (reply.aborted, reply.frozen) == (1, 0)
    for sample in range(2):
        assert answer.reason(sample) == "VERSION_CHANGED"
        assert answer.spans(sample) == [(0, len(answer.tokens(sample)), now, now)]
        assert 0 < len(answer.tokens(sample)) < 200


async def test_a_request_waits_for_the_version_that_it_needs(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    needs = pb.VersionPolicy(min_weight_version=now + 1)
    error = await refused(calls.stream(ask(5, version=needs), timeout_s=0.2))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    waiting = asyncio.create_task(calls.generate(ask(5, version=needs)))
    await asyncio.sleep(0.1)
    assert (await calls.status()).waiting == 1
    await published(calls, epoch, draft(now + 1, forcing(6)))
    answer = await waiting
    assert answer.tokens() == [6] * 5
    assert answer.started is not None
    assert answer.started.weight_version == now + 1


async def test_a_pause_is_idempotent_and_a_wrong_id_is_not_found(calls: RawCalls, epoch: int) -> None:
    same = fence(epoch, "one pause")
    one, two = await asyncio.gather(*(pause(calls, epoch, KEEP, fence=same) for _ in range(2)))
    assert one == two == await pause(calls, epoch, KEEP, fence=same)
    other = await refused(pause(calls, epoch, KEEP))
    assert (other.code, other.details["pause_id"]) == (grpc.StatusCode.FAILED_PRECONDITION, one.pause_id)
    assert (await refused(resume(calls, epoch, "wrong"))).code is grpc.StatusCode.NOT_FOUND
    assert (await refused(pause(calls, epoch, 0))).code is grpc.StatusCode.INVALID_ARGUMENT
    assert (await refused(pause(calls, epoch, 77))).code is grpc.StatusCode.INVALID_ARGUMENT
    await resume(calls, epoch, one.pause_id)
    await resume(calls, epoch, one.pause_id)
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_SERVING


async def test_leases_and_names_have_bounds(calls: RawCalls, epoch: int) -> None:
    long = await refused(pause(calls, epoch, KEEP, lease=Duration(seconds=90_000)))
    named = await refused(pause(calls, epoch, KEEP, fence=fence(epoch, "x" * 201)))
    owner = await refused(calls.engine.AcquireControl(control_pb2.AcquireControlRequest(owner="x" * 201), timeout=5))
    assert {long.code, named.code, owner.code} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert "at most 86400" in long.message
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_SERVING


async def test_the_end_of_its_lease_ends_the_pause(calls: RawCalls, epoch: int) -> None:
    task = await running(calls, ask(40))
    began = time.monotonic()
    await pause(calls, epoch, KEEP, lease=Duration(nanos=300_000_000))
    answer = await task
    assert len(answer.tokens()) == 40
    assert time.monotonic() - began > 0.3


async def test_a_pause_may_refuse_new_work_or_queue_it(calls: RawCalls, epoch: int) -> None:
    paused = await pause(calls, epoch, KEEP, admission=control_pb2.ADMISSION_REJECT)
    error = await refused(calls.stream(ask(3)))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "PAUSED")
    await resume(calls, epoch, paused.pause_id)
    paused = await pause(calls, epoch, KEEP, admission=control_pb2.ADMISSION_QUEUE)
    queued = asyncio.create_task(calls.generate(ask(3)))
    await asyncio.sleep(0.1)
    assert (await calls.status()).waiting == 1
    await resume(calls, epoch, paused.pause_id)
    assert len((await queued).tokens()) == 3


async def test_a_commit_under_a_pause_stays_paused_and_one_may_ask_to_stay_so(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    task = await running(calls, ask(60))
    paused = await pause(calls, epoch, KEEP)
    reply = await published(calls, epoch, draft(now + 1, forcing(8)))
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_PAUSED
    assert reply.frozen == 1
    await resume(calls, epoch, paused.pause_id)
    assert [s[2] for s in (await task).spans()] == [now, now + 1]
    d = await staged(calls, epoch, draft(now + 2, forcing(9)))
    await commit(calls, epoch, d.update_id, now + 1, stay_paused=True)
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_PAUSED
    await resume(calls, epoch, d.update_id)
    assert (await calls.generate(ask(3))).tokens() == [9] * 3


async def test_a_commit_that_aborts_keeps_the_tokens(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = await staged(calls, epoch, draft(now + 1))
    task = await running(calls, ask(100))
    reply = await commit(calls, epoch, d.update_id, now, mode=ABORT)
    answer = await task
    assert (reply.aborted, reply.frozen) == (1, 0)
    assert (answer.reason(), answer.spans()) == ("PAUSED", [(0, len(answer.tokens()), now, now)])


async def test_a_taken_over_server_calls_off_a_pause_that_still_waits(calls: RawCalls, epoch: int) -> None:
    task = await running(calls, ask(100))
    waiting = asyncio.create_task(pause(calls, epoch, WAIT))
    await asyncio.sleep(0.05)
    await calls.epoch("other")
    error = await refused(waiting)
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "FENCED")
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_SERVING
    assert len((await task).tokens()) == 100
