"""Changed elements over the committed weights, against a real server process: never over another base, never half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc
import numpy as np
import pytest
from raw_calls import RawCalls, ask, raw_calls, refused
from raw_updates import (
    FORCING,
    LAYOUT,
    VOCAB,
    Draft,
    abort,
    begin,
    chunk,
    commit,
    delta_draft,
    draft,
    forcing,
    published,
    pull,
    seal,
    send,
    shm_file,
    shm_transport,
    staged,
    state,
    version,
)
from skyrl_rollout import wire
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, TensorSpec

EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--delta") as process:
        yield process


@pytest.fixture(autouse=True)
async def full(calls: RawCalls, epoch: int) -> None:
    """A full version under which the server says 1."""
    await published(calls, epoch, draft(await version(calls) + 1, forcing(1)))


def moved(base: int, old: int, new: int) -> Draft:
    """From weights that force `old` to weights that force `new`, as version base + 1."""
    first, last = sorted((old, new))
    values = np.array([FORCING if i == new else 0 for i in (first, last)], "<f4")
    return delta_draft(base + 1, base, {"canary.weight": ([first, last], values)}, forcing(new))


async def test_a_delta_changes_what_it_names_and_nothing_else(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    rng = np.random.default_rng(0)
    embed = rng.random((VOCAB, 16), np.float32)
    await published(calls, epoch, draft(now + 1, forcing(1) | {EMBED: embed}))
    await published(calls, epoch, moved(now + 1, 1, 12))
    assert (await calls.generate(ask(3))).tokens() == [12] * 3
    embed = embed.copy()
    embed.reshape(-1)[[0, 7, 1023]] = [1.5, -2.5, np.nan]
    changes = {
        "canary.weight": ([12, 60], np.array([0, FORCING], "<f4")),
        EMBED: ([0, 7, 1023], np.array([1.5, -2.5, np.nan], "<f4")),
    }
    reply = await published(calls, epoch, delta_draft(now + 3, now + 2, changes, forcing(60) | {EMBED: embed}))
    assert (reply.previous_version, reply.weight_version) == (now + 2, now + 3)
    assert (await calls.generate(ask(3))).tokens() == [60] * 3


async def test_the_same_delta_twice_is_the_same_version_once(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = moved(now, 1, 13)
    first = await published(calls, epoch, d)
    assert await commit(calls, epoch, d.update_id, now) == first
    again = await begin(calls, epoch, replace(d, update_id="again"))
    assert again.state == pb.UPDATE_STATE_COMMITTED
    assert await version(calls) == now + 1


async def test_a_delta_over_another_version_is_told_the_current_one(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    error = await refused(begin(calls, epoch, replace(moved(now - 1, 1, 5), manifest=moved(now + 1, 1, 5).manifest)))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_CONFLICT")
    assert error.details["current_version"] == str(now)
    assert (await calls.status()).open_update_id == ""


async def test_a_delta_that_does_not_lead_to_its_digest_is_found_at_the_seal(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    good = moved(now, 1, 14)
    bad = replace(good, shard=bytearray(good.shard))
    bad.shard[-1] ^= 1
    await begin(calls, epoch, good)
    await send(calls, chunk(bad, 0, len(bad.shard)))
    error = await refused(seal(calls, epoch, good.update_id))
    assert (error.code, "canary.weight" in error.message) == (grpc.StatusCode.DATA_LOSS, True)
    assert (await calls.generate(ask(3))).tokens() == [1] * 3
    await send(calls, chunk(good, 0, len(good.shard)))
    await seal(calls, epoch, good.update_id)
    await commit(calls, epoch, good.update_id, now)
    assert (await calls.generate(ask(3))).tokens() == [14] * 3


@pytest.mark.parametrize("indices", [[5, 5], [6, 5], [-1, 5], [5, VOCAB]])
async def test_places_that_are_not_ascending_inside_the_tensor_are_refused(
    calls: RawCalls, epoch: int, indices: list[int]
) -> None:
    now = await version(calls)
    d = delta_draft(now + 1, now, {"canary.weight": (indices, np.ones(2, "<f4"))}, forcing(1))
    await begin(calls, epoch, d)
    await send(calls, chunk(d, 0, len(d.shard)))
    error = await refused(seal(calls, epoch, d.update_id))
    assert (error.code, "strictly ascending" in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    await abort(calls, epoch, d.update_id)
    assert await version(calls) == now


async def test_a_delta_at_odds_with_itself_or_the_model_is_refused_at_begin(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    good = moved(now, 1, 15)
    canary = good.manifest.tensors[0]
    wide = replace(canary, layout=TensorLayout("canary.weight", "f32", (65,)))
    alien = replace(canary, layout=TensorLayout("alien.weight", "f32", (VOCAB,)))
    for spec, said in (
        (replace(canary, sent_nbytes=15), "n int32 indices"),
        (replace(canary, sent_nbytes=8 * (VOCAB + 1)), f"at most {VOCAB}"),
        (wide, "[65]"),
        (alien, "alien.weight"),
    ):
        d = replace(good, manifest=replace(good.manifest, tensors=(spec,)))
        error = await refused(begin(calls, epoch, d))
        assert (error.code, said in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.message
    manifest = wire.manifest_to_pb(good.manifest)
    manifest.overwrite.index_encoding = "i64"
    assert "'i32'" in (await refused(begin(calls, epoch, good, manifest=manifest))).message
    manifest = wire.manifest_to_pb(good.manifest)
    manifest.ClearField("base_version")
    assert "base_version" in (await refused(begin(calls, epoch, good, manifest=manifest))).message


async def test_an_aborted_delta_leaves_the_copy_as_it_was(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    dropped = await staged(calls, epoch, moved(now, 1, 16))
    await abort(calls, epoch, dropped.update_id)
    assert await state(calls, dropped.update_id) == "ABORTED"
    await published(calls, epoch, moved(now, 1, 17))
    assert (await calls.generate(ask(3))).tokens() == [17] * 3


async def test_shared_memory_is_copied_at_the_pull_so_that_a_delta_can_follow(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = draft(now + 1, forcing(2))
    with shm_file(bytes(d.shard)) as name:
        await begin(calls, epoch, d, transport=shm_transport(name, len(d.shard)))
        told = await pull(calls, epoch, d.update_id)
    assert told[-1].phase == pb.PullUpdateResponse.PHASE_SOURCE_RELEASED
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    change = moved(now + 1, 2, 18)
    with shm_file(bytes(change.shard)) as name:
        await begin(calls, epoch, change, transport=shm_transport(name, len(change.shard)))
        await pull(calls, epoch, change.update_id)
        await seal(calls, epoch, change.update_id)
        await commit(calls, epoch, change.update_id, now + 1)
    assert (await calls.generate(ask(3))).tokens() == [18] * 3


async def test_the_memory_of_a_delta_is_counted_before_it_moves(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    good = moved(now, 1, 19)
    far = replace(good.manifest.tensors[0], offset=1 << 50)
    error = await refused(begin(calls, epoch, replace(good, manifest=replace(good.manifest, tensors=(far,)))))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL")


async def test_nothing_changes_over_weights_that_were_never_published() -> None:
    with ReferenceServer("--delta") as fresh:
        async with raw_calls(fresh) as calls:
            offers = (await calls.engine.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=5)).capabilities
            epoch = await calls.epoch()
            spec = TensorSpec(LAYOUT[0], 0, 0, bytes(16), 8)
            d = Draft(Manifest(1, (spec,), base_version=0), bytearray(8))
            error = await refused(begin(calls, epoch, d))
    assert offers.delta
    assert (error.code, "publish in full first" in error.message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
