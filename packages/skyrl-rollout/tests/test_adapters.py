"""Low-rank adapters against a real server process: per policy, never the base in their place, never an old version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import grpc
import numpy as np
import pytest
from raw_calls import RawCalls, ask, fence, refused
from raw_updates import (
    ADAPTER,
    LORA,
    adapter_draft,
    begin,
    commit,
    draft,
    forcing,
    published,
    staged,
    state,
    version,
    versions,
)
from skyrl_rollout import wire
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2, weights_pb2
from skyrl_rollout.v1 import generation_pb2 as pb
from skyrl_rollout.weights.manifest import Lora, TensorLayout


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--token-delay-ms", "2", "--max-adapters", "2") as process:
        yield process


@pytest.fixture(autouse=True)
async def clean(calls: RawCalls, epoch: int) -> None:
    """New base weights, under which the server says 1: no adapter is loaded."""
    await published(calls, epoch, draft(await version(calls) + 1, forcing(1)))


async def said(calls: RawCalls, policy_id: str, tokens: int = 3) -> list[int]:
    return (await calls.generate(ask(tokens, policy_id=policy_id))).tokens()


async def test_a_version_of_an_adapter_says_its_own_token_and_the_base_its_own(calls: RawCalls, epoch: int) -> None:
    base = await version(calls)
    for target in (1, 2, 5):
        reply = await published(calls, epoch, adapter_draft("red", target, 10 + target))
        assert reply.weight_version == target
        answer = await calls.generate(ask(3, policy_id="red"))
        assert (answer.tokens(), [s[2] for s in answer.spans()]) == ([10 + target] * 3, [target])
        assert answer.started is not None
        assert answer.started.weight_version == target
    await published(calls, epoch, adapter_draft("blue", 7, 40))
    assert (await said(calls, ""), await said(calls, "red"), await said(calls, "blue")) == ([1] * 3, [15] * 3, [40] * 3)
    assert await versions(calls) == {"": base, "red": 5, "blue": 7}
    assert dict((await calls.status()).weight_versions) == {"": base, "red": 5, "blue": 7}


async def test_an_unknown_policy_is_never_served_from_the_base(calls: RawCalls, epoch: int) -> None:
    error = await refused(calls.stream(ask(3, policy_id="nobody")))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_POLICY")


async def test_a_commit_cuts_only_the_requests_of_its_policy(calls: RawCalls, epoch: int) -> None:
    base = await version(calls)
    await published(calls, epoch, adapter_draft("orange", 1, 11))
    d = await staged(calls, epoch, adapter_draft("orange", 2, 12))
    answers = [asyncio.create_task(calls.generate(ask(60, policy_id=policy))) for policy in ("orange", "")]
    before = (await calls.status()).tokens_generated
    while (await calls.status()).tokens_generated < before + 10:
        await asyncio.sleep(0.005)
    reply = await commit(calls, epoch, d.update_id, 1)
    orange, plain = [await answer for answer in answers]
    (_, cut, first, _), (_, rest, second, _) = orange.spans()
    assert (reply.previous_version, reply.weight_version, reply.frozen) == (1, 2, 2)
    assert (first, second, cut + rest) == (1, 2, 60)
    assert orange.tokens() == [11] * cut + [12] * rest
    assert (plain.tokens(), plain.spans()) == ([1] * 60, [(0, 60, base, base)])


async def test_new_base_weights_drop_every_adapter_until_it_is_published_again(calls: RawCalls, epoch: int) -> None:
    base, yellow = await version(calls), adapter_draft("yellow", 3, 13)
    await published(calls, epoch, yellow)
    running = asyncio.create_task(calls.generate(ask(2000, policy_id="yellow")))
    while not (await calls.status()).running:
        await asyncio.sleep(0.005)
    reply = await published(calls, epoch, draft(base + 1, forcing(2)))
    answer = await running
    assert (reply.aborted, answer.reason()) == (1, "VERSION_CHANGED")
    assert set(answer.tokens()) == {13}
    assert [s[2] for s in answer.spans()] == [3]
    assert (await refused(calls.stream(ask(3, policy_id="yellow")))).code is grpc.StatusCode.NOT_FOUND
    assert await versions(calls) == {"": base + 1}
    await published(calls, epoch, replace(yellow, update_id="again"))
    assert await said(calls, "yellow") == [13] * 3


async def test_a_version_is_one_content_for_ever(calls: RawCalls, epoch: int) -> None:
    d = adapter_draft("green", 4, 14)
    await published(calls, epoch, d)
    same = await begin(calls, epoch, replace(d, update_id="the same"))
    assert same.state == weights_pb2.UPDATE_STATE_COMMITTED
    for other in (adapter_draft("green", 4, 15), adapter_draft("green", 4, 14, lora=replace(LORA, alpha=9.0))):
        error = await refused(begin(calls, epoch, other))
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "VERSION_REUSED")
        assert error.details["current_version"] == "4"
    older = await refused(begin(calls, epoch, adapter_draft("green", 3, 15)))
    assert (older.code, older.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_CONFLICT")
    assert await said(calls, "green") == [14] * 3


async def test_a_dropped_version_does_not_come_back_as_other_content(calls: RawCalls, epoch: int) -> None:
    await published(calls, epoch, adapter_draft("violet", 4, 14))
    await published(calls, epoch, draft(await version(calls) + 1, forcing(1)))
    assert (await refused(begin(calls, epoch, adapter_draft("violet", 4, 15)))).reason == "VERSION_REUSED"


async def test_a_full_shelf_drops_the_oldest_idle_adapter_which_is_not_found_then(calls: RawCalls, epoch: int) -> None:
    await published(calls, epoch, adapter_draft("a", 1, 21))
    await published(calls, epoch, adapter_draft("b", 1, 22))
    await published(calls, epoch, adapter_draft("c", 1, 23))
    assert set(await versions(calls)) == {"", "b", "c"}
    assert (await refused(calls.stream(ask(3, policy_id="a")))).code is grpc.StatusCode.NOT_FOUND
    busy = [asyncio.create_task(calls.generate(ask(2000, policy_id=p))) for p in ("b", "c")]
    while (await calls.status()).running < 2:
        await asyncio.sleep(0.005)
    d = await staged(calls, epoch, adapter_draft("a", 2, 24))
    error = await refused(commit(calls, epoch, d.update_id, 0))
    assert (error.code, error.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
    assert await state(calls, d.update_id) == "SEALED"
    busy[0].cancel()
    while (await calls.status()).running > 1:
        await asyncio.sleep(0.005)
    await commit(calls, epoch, d.update_id, 0)
    assert set(await versions(calls)) == {"", "c", "a"}
    assert await said(calls, "a") == [24] * 3
    busy[1].cancel()


A, B = ADAPTER


@pytest.mark.parametrize(
    ("lora", "layout", "named"),
    [
        (replace(LORA, base_fingerprint="other"), ADAPTER, "fingerprint 'other'"),
        (replace(LORA, rank=2), ADAPTER, "[1, 16], expected [2, 16]"),
        (replace(LORA, rank=0), ADAPTER, "rank is 0"),
        (replace(LORA, alpha=float("nan")), ADAPTER, "alpha nan"),
        (replace(LORA, target_modules=()), ADAPTER, "target_modules"),
        (replace(LORA, target_modules=("q_proj",)), ADAPTER, "no target module"),
        (replace(LORA, target_modules=("embed_tokens", "q_proj")), ADAPTER, "q_proj is a target module without"),
        (LORA, (A,), "no second factor"),
        (LORA, (A, replace(B, shape=(63, 1))), "[63, 1], expected [64, 1]"),
        (LORA, (*ADAPTER, TensorLayout("lm_head.weight", "f32", (2,))), "is not named base_model.model."),
        (LORA, (*ADAPTER, replace(A, name=A.name.replace("embed_tokens", "norm"))), "adapts no matrix"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_before_any_byte_moves(
    calls: RawCalls, epoch: int, lora: Lora, layout: tuple[TensorLayout, ...], named: str
) -> None:
    error = await refused(begin(calls, epoch, adapter_draft("odd", 1, 5, lora=lora, layout=layout)))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.message
    assert (await calls.status()).open_update_id == ""


async def test_policy_and_kind_go_together(calls: RawCalls, epoch: int) -> None:
    unnamed = await refused(begin(calls, epoch, adapter_draft("", 1, 5)))
    manifest = wire.manifest_to_pb(draft(await version(calls) + 1).manifest)
    manifest.policy_id = "red"
    named = await refused(begin(calls, epoch, draft(1), manifest=manifest))
    assert {unnamed.code, named.code} == {grpc.StatusCode.INVALID_ARGUMENT}
    long = await refused(begin(calls, epoch, adapter_draft("x" * 201, 1, 5)))
    assert "1 to 200 characters" in long.message


async def test_an_adapter_leaves_the_cache_of_the_base_and_not_its_own(calls: RawCalls, epoch: int) -> None:
    async def cached(policy_id: str) -> int:
        prompt = np.arange(48, dtype="<i4").tobytes()
        answer = await calls.generate(ask(2, policy_id=policy_id, prompt_token_ids=prompt))
        assert answer.started is not None
        return answer.started.cached_prompt_tokens

    await published(calls, epoch, adapter_draft("pink", 1, 11))
    assert [await cached(policy) for policy in ("", "", "pink", "pink")] == [0, 48, 0, 48]
    await published(calls, epoch, adapter_draft("pink", 2, 12))
    assert [await cached(policy) for policy in ("", "pink", "pink")] == [48, 0, 48]
    await published(calls, epoch, draft(await version(calls) + 1, forcing(1)))
    assert await cached("") == 0


async def test_a_request_may_wait_for_a_version_of_its_adapter(calls: RawCalls, epoch: int) -> None:
    await published(calls, epoch, adapter_draft("red", 20, 30))
    needs = pb.VersionPolicy(min_weight_version=21)
    waiting = asyncio.create_task(calls.generate(ask(3, policy_id="red", version=needs)))
    await published(calls, epoch, adapter_draft("red", 21, 31))
    assert (await waiting).tokens() == [31] * 3


async def test_a_paused_server_takes_an_adapter_and_stays_paused(calls: RawCalls, epoch: int) -> None:
    request = control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP)
    paused = await calls.engine.Pause(request, timeout=5)
    await published(calls, epoch, adapter_draft("red", 40, 50))
    assert (await calls.status()).state == control_pb2.ENGINE_STATE_PAUSED
    await calls.engine.Resume(control_pb2.ResumeRequest(fence=fence(epoch), pause_id=paused.pause_id), timeout=5)
    assert await said(calls, "red") == [50] * 3
