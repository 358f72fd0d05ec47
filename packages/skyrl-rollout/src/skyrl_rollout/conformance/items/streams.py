"""Items 8 to 13: one execution per request id, re-attach without a gap, and every way in which work is ended."""

from __future__ import annotations

import asyncio
import uuid

import grpc
import xxhash

from skyrl_rollout.conformance.answers import Reading
from skyrl_rollout.conformance.item import Failed, expect
from skyrl_rollout.conformance.items.tokens import check_whole
from skyrl_rollout.conformance.stubs import refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.v1 import generation_pb2 as pb

FREED_WITHIN_S = 2.0
GRACE_S = 10
PACE_S = 0.005


async def one_execution_per_id(target: Target) -> None:
    """Item 8."""
    before = (await target.stubs.status()).tokens_generated
    request = target.ask(40, pace_s=PACE_S, num_samples=2, sampling={"temperature": 1.0})
    async with target.opened() as other:
        readings = target.read(request), target.read(request, stubs=other)
        first, second = await asyncio.gather(*(r.rest() for r in readings))
    check_whole(first)
    expect(first.seqs == second.seqs, f"two calls with one id saw {len(first.seqs)} and {len(second.seqs)} events")
    expect(
        first.deltas == second.deltas and first.finished == second.finished, "two calls with one id saw other events"
    )
    made = (await target.stubs.status()).tokens_generated - before
    expect(made == 80, f"{made} tokens were generated for two calls with one id, expected 80")


async def one_id_one_request(target: Target) -> None:
    """Item 9."""
    request = target.ask(60, pace_s=PACE_S)
    reading = target.read(request)
    await reading.tokens(2)
    other = pb.GenerateRequest()
    other.CopyFrom(request)
    other.sampling.max_tokens = 61
    for moment in ("runs", "has ended"):
        error = await refused(
            target.read(other).call,
            grpc.StatusCode.ALREADY_EXISTS,
            what=f"a request id that another request had, which {moment},",
        )
        expect(error.reason == "REQUEST_ID_REUSED", f"ErrorInfo.reason is {error.reason}, expected REQUEST_ID_REUSED")
        answer = await reading.rest()
        expect(len(answer.tokens()) == 60, "the first request was disturbed by the second one with its id")


async def reattach_without_a_gap(target: Target) -> None:
    """Item 10."""
    count = target.lasting(60)
    request = target.ask(count, pace_s=PACE_S, sampling={"temperature": 1.0})
    request.detach_grace.FromSeconds(GRACE_S)
    async with target.opened() as other:
        reading = target.read(request, stubs=other)
        await reading.until(lambda a: 7 in a.seqs, "seq 7")
        reading.drop()
    seen = list(reading.answer.deltas)
    await asyncio.sleep(0.1)
    request.resume_after = 7
    again = await target.read(request).rest()
    expect(again.seqs[:1] == [8], f"after resume_after=7 the first event is {again.seqs[:1]}, expected 8")
    expect(again.seqs == list(range(8, 8 + len(again.seqs))), f"seqs after 7 are not dense: {again.seqs[:20]}")
    kept = b"".join(d.token_ids for d in seen[: 7 - 1])
    whole = kept + b"".join(d.token_ids for d in again.deltas)
    expect(again.end().num_tokens == count, f"{again.end().num_tokens} tokens after the re-attach, expected {count}")
    expect(xxhash.xxh3_128_digest(whole) == again.end().token_digest, "the two halves are not the tokens of the digest")


async def cancel_frees(target: Target) -> None:
    """Item 11."""
    before = await target.stubs.status()
    readings = [target.read(target.ask_long()) for _ in range(3)]
    for reading in readings:
        await reading.tokens(2)
    for reading in readings:
        reading.drop()
    await freed(target, before.kv_usage)


async def freed(target: Target, kv_usage: float) -> None:
    """Nothing runs and no KV is held within 2 s. Raises Failed."""
    await target.quiet(FREED_WITHIN_S)
    for _ in range(20):
        now = (await target.stubs.status()).kv_usage
        if now <= kv_usage + 1e-3:
            return
        await asyncio.sleep(0.05)
    raise Failed(f"kv_usage is {now:.3f} after the work was dropped, it was {kv_usage:.3f} before")


async def abort_is_a_result(target: Target) -> None:
    """Item 12."""
    name = str(uuid.uuid4())
    prompt = target.prompt()
    doomed = target.read(target.ask_long(prompt=prompt, request_id=name))
    kin = target.read(target.ask(80, pace_s=PACE_S, prompt=prompt, request_id=name + "0"))
    await doomed.tokens(3)
    await kin.tokens(1)
    reply = await abort(target, name)
    expect(
        list(reply.aborted) == [name] and not reply.not_found,
        f"AbortGenerations answered aborted {list(reply.aborted)}, expected [{name}]",
    )
    answer = await doomed.rest()
    check_whole(answer)
    expect(answer.reason() == "ABORTED", f"the aborted stream ended with {answer.reason()}, expected ABORTED")
    expect(len(answer.tokens()) >= 3, "tokens that were made before the abort are gone")
    reply = await abort(target, name)
    expect(list(reply.not_found) == [name], f"a second abort answered not_found {list(reply.not_found)}")
    other = await kin.rest()
    expect(
        other.reason() == "LENGTH" and len(other.tokens()) == 80,
        f"the abort of one id ended another that begins with it: {other.reason()} after {len(other.tokens())} tokens",
    )


async def abort(target: Target, *ids: str) -> pb.AbortGenerationsResponse:
    """The reply of AbortGenerations."""
    reply: pb.AbortGenerationsResponse = await target.stubs.rollout.AbortGenerations(
        pb.AbortGenerationsRequest(request_ids=ids, reason="conformance")
    )
    return reply


async def deadline_ends_work(target: Target) -> None:
    """Item 13."""
    before = await target.stubs.status()
    reading: Reading = target.read(target.ask_long(), timeout_s=0.5)
    try:
        await reading.rest()
    except grpc.aio.AioRpcError as error:
        code = error.code()
        expect(
            code is grpc.StatusCode.DEADLINE_EXCEEDED, f"the call ended with {code.name}, expected DEADLINE_EXCEEDED"
        )
    else:
        expect(len(reading.answer.tokens()) == 0, "all of the context was generated within 0.5 s: no deadline to see")
    await freed(target, before.kv_usage)
