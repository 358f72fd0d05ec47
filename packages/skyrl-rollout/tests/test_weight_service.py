"""Weight updates against a real server process: all or nothing, and the old version serves until the commit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import zstandard
from google.protobuf.duration_pb2 import Duration
from raw_calls import RawCalls, ask, fence, raw_calls, refused
from raw_updates import (
    LAYOUT,
    abort,
    begin,
    chunk,
    commit,
    draft,
    flipped,
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
from skyrl_rollout.weights.manifest import TensorLayout


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--max-chunk-bytes", "65536") as process:
        yield process


GREEDY = {"sampling": {"temperature": 0.0}}


async def test_the_old_version_serves_until_the_commit_and_the_new_one_after_it(calls: RawCalls, epoch: int) -> None:
    before = await calls.generate(ask(20, **GREEDY))
    now = await version(calls)
    d = draft(now + 1, forcing(11))
    await begin(calls, epoch, d)
    assert (await calls.generate(ask(20, **GREEDY))).tokens() == before.tokens()
    await send(calls, chunk(d, 0, len(d.shard)))
    sealed = await seal(calls, epoch, d.update_id)
    assert sealed.manifest_digest == d.manifest.digest
    assert (await calls.generate(ask(20, **GREEDY))).tokens() == before.tokens()
    reply = await commit(calls, epoch, d.update_id, now)
    after = await calls.generate(ask(20))
    assert (reply.previous_version, reply.weight_version) == (now, now + 1)
    assert after.tokens() == [11] * 20
    assert after.started is not None
    assert after.started.weight_version == now + 1


async def test_a_version_says_its_own_token(calls: RawCalls, epoch: int) -> None:
    for _ in range(3):
        target = await version(calls) + 1
        await published(calls, epoch, draft(target, forcing(target)))
        answers = await asyncio.gather(*(calls.generate(ask(5, num_samples=2)) for _ in range(5)))
        assert {t for a in answers for s in range(2) for t in a.tokens(s)} == {target}


async def test_a_commit_is_done_once_and_answered_twice(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = await staged(calls, epoch, draft(now + 5))
    one, two = await asyncio.gather(*(commit(calls, epoch, d.update_id, now) for _ in range(2)))
    again = await commit(calls, epoch, d.update_id, now)
    assert one == two == again
    assert await version(calls) == now + 5
    assert await state(calls, d.update_id) == "COMMITTED"
    stale = await refused(begin(calls, epoch, draft(now + 5, forcing(1))))
    assert (stale.code, stale.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_CONFLICT")
    assert stale.details["current_version"] == str(now + 5)
    same = draft(now + 5)
    assert (await begin(calls, epoch, same)).state == pb.UPDATE_STATE_COMMITTED
    assert (await commit(calls, epoch, same.update_id, now + 5)).weight_version == now + 5


async def test_another_version_than_expected_is_refused(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = await staged(calls, epoch, draft(now + 1))
    error = await refused(commit(calls, epoch, d.update_id, now + 1))
    assert (error.code, error.details["current_version"]) == (grpc.StatusCode.FAILED_PRECONDITION, str(now))
    await commit(calls, epoch, d.update_id, now)


async def test_a_flipped_byte_is_found_at_the_seal_and_can_be_sent_again(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    good = draft(now + 1, forcing(3))
    bad = flipped(good)
    await begin(calls, epoch, good)
    await send(calls, chunk(bad, 0, len(bad.shard)))
    error = await refused(seal(calls, epoch, good.update_id))
    assert error.code is grpc.StatusCode.DATA_LOSS
    assert "model.embed_tokens.weight" in error.message
    assert (await refused(commit(calls, epoch, good.update_id, now))).code is grpc.StatusCode.FAILED_PRECONDITION
    assert await version(calls) == now
    await send(calls, chunk(good, 0, len(good.shard)))
    await seal(calls, epoch, good.update_id)
    await commit(calls, epoch, good.update_id, now)
    assert await version(calls) == now + 1


async def test_a_chunk_with_a_wrong_checksum_is_refused(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    await begin(calls, epoch, d)
    error = await refused(send(calls, chunk(d, 0, 100, crc32c=1)))
    assert error.code is grpc.StatusCode.DATA_LOSS
    await abort(calls, epoch, d.update_id)


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (LAYOUT[1:], "canary.weight"),
        ((*LAYOUT, TensorLayout("extra.weight", "f32", (2,))), "extra.weight"),
        ((*LAYOUT[:2], TensorLayout("model.norm.weight", "f32", (17,))), "[17]"),
        ((*LAYOUT[:2], TensorLayout("model.norm.weight", "bf16", (16,))), "bf16"),
    ],
)
async def test_tensors_of_another_model_are_named_before_any_byte_moves(
    calls: RawCalls, epoch: int, layout: tuple[TensorLayout, ...], named: str
) -> None:
    error = await refused(begin(calls, epoch, draft(await version(calls) + 1, layout=layout)))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MODEL_MISMATCH")
    assert len(error.violations) == 1
    assert named in " ".join(error.violations[0])


async def test_a_killed_upload_goes_on_at_the_durable_offset(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = draft(now + 1, {"model.embed_tokens.weight": np.random.default_rng(0).random((64, 16), np.float32)})
    await begin(calls, epoch, d)
    assert (await send(calls, chunk(d, 0, 1000))).durable_offset == 1000
    hole = await refused(send(calls, chunk(d, 1500, 2000)))
    assert (hole.code, hole.details["durable_offset"]) == (grpc.StatusCode.OUT_OF_RANGE, "1000")
    overlap = await refused(send(calls, chunk(d, 500, 1500)))
    assert overlap.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (await send(calls, chunk(d, 0, 500))).durable_offset == 1000
    beyond = await refused(send(calls, chunk(d, 1000, 1000, data=bytes(len(d.shard)), crc32c=0)))
    assert beyond.code is grpc.StatusCode.DATA_LOSS
    incomplete = await refused(seal(calls, epoch, d.update_id))
    assert incomplete.code is grpc.StatusCode.FAILED_PRECONDITION
    reply = await calls.weights.GetUpdate(pb.GetUpdateRequest(update_id=d.update_id), timeout=5)
    assert reply.durable_offsets[0] == 1000
    assert (await begin(calls, epoch, d)).state == pb.UPDATE_STATE_OPEN
    await send(calls, chunk(d, 1000, 2000), chunk(d, 2000, len(d.shard)))
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)


async def test_a_chunk_above_the_limit_is_refused(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    reply = await begin(calls, epoch, d)
    assert (reply.chunk_bytes, reply.staged) == (65536, True)
    error = await refused(send(calls, chunk(d, 0, 10, data=bytes(65537))))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    await abort(calls, epoch, d.update_id)


async def test_compressed_chunks_are_taken_and_bombs_are_not(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = draft(now + 1, forcing(21))
    await begin(calls, epoch, d, compression=pb.COMPRESSION_ZSTD)
    bomb = chunk(replace(d, shard=bytearray(zstandard.compress(bytes(1 << 24)))), 0, 1 << 16)
    assert (await refused(send(calls, bomb))).code is grpc.StatusCode.INVALID_ARGUMENT
    packed = chunk(replace(d, shard=bytearray(zstandard.compress(bytes(d.shard)))), 0, 1 << 16)
    await send(calls, packed)
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    assert (await calls.generate(ask(3))).tokens() == [21] * 3


async def test_shared_memory_is_mapped_checked_and_committed(
    server: ReferenceServer, calls: RawCalls, epoch: int
) -> None:
    now = await version(calls)
    d = draft(now + 1, forcing(40))
    with shm_file(bytes(d.shard)) as name:
        await begin(calls, epoch, d, transport=shm_transport(name, len(d.shard)))
        assert (await refused(send(calls, chunk(d, 0, 10)))).code is grpc.StatusCode.FAILED_PRECONDITION
        progress = await pull(calls, epoch, d.update_id)
        assert name in maps(server)
        assert progress[-1].bytes_done == progress[-1].bytes_total == len(d.shard)
        await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    assert (await calls.generate(ask(3))).tokens() == [40] * 3
    assert name not in maps(server)


async def test_shared_memory_that_is_not_what_it_says_is_refused(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    here = shm_transport("x", len(d.shard))
    foreign = shm_transport("x", len(d.shard), "other:1")
    assert (await refused(begin(calls, epoch, d, transport=foreign))).code is grpc.StatusCode.FAILED_PRECONDITION
    with shm_file(bytes(d.shard)) as real, shm_file(b"short") as short:
        link = f"{real}-link"
        os.symlink(f"/dev/shm/{real}", f"/dev/shm/{link}")
        try:
            for name in (link, short, "../etc/passwd", "sub/dir", "missing"):
                d = replace(d, update_id=f"shm {name}")
                here.shm.segments[0].name = name
                await begin(calls, epoch, d, transport=here)
                error = await refused(pull(calls, epoch, d.update_id))
                assert error.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION), name
                await abort(calls, epoch, d.update_id)
        finally:
            os.unlink(f"/dev/shm/{link}")


async def test_a_lower_epoch_is_fenced_from_every_control_call(calls: RawCalls, epoch: int) -> None:
    higher = await calls.epoch("other")
    assert higher == epoch + 1
    old = fence(epoch)
    d = draft(await version(calls) + 1)
    attempts = [
        calls.engine.Pause(control_pb2.PauseRequest(fence=old, mode=3), timeout=5),
        calls.engine.Resume(control_pb2.ResumeRequest(fence=old), timeout=5),
        calls.engine.ResetCache(control_pb2.ResetCacheRequest(fence=old), timeout=5),
        calls.engine.Sleep(control_pb2.SleepRequest(fence=old), timeout=5),
        calls.engine.WakeUp(control_pb2.WakeUpRequest(fence=old), timeout=5),
        begin(calls, epoch, d),
        pull(calls, epoch, "x"),
        seal(calls, epoch, "x"),
        commit(calls, epoch, "x", 0),
        abort(calls, epoch, "x"),
        calls.engine.AcquireControl(control_pb2.AcquireControlRequest(owner="o", claim_epoch=epoch), timeout=5),
    ]
    errors = [await refused(a) for a in attempts]
    assert {(e.code, e.reason) for e in errors} == {(grpc.StatusCode.ABORTED, "FENCED")}
    assert (await refused(begin(calls, 0, d))).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_higher_epoch_aborts_the_open_update_and_ends_the_pause(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = await staged(calls, epoch, draft(now + 1))
    await calls.engine.Pause(control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP), timeout=5)
    assert (await calls.status()).open_update_id == d.update_id
    await calls.engine.AcquireControl(control_pb2.AcquireControlRequest(owner="new", claim_epoch=epoch + 7), timeout=5)
    assert await state(calls, d.update_id) == "ABORTED"
    status = await calls.status()
    assert (status.state, status.open_update_id) == (control_pb2.ENGINE_STATE_SERVING, "")
    await published(calls, epoch + 7, draft(now + 1))


async def test_one_update_is_live_at_a_time_and_ids_are_not_reused(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = draft(now + 1)
    await begin(calls, epoch, d)
    other = await refused(begin(calls, epoch, draft(now + 1)))
    assert (other.code, other.details["update_id"]) == (grpc.StatusCode.FAILED_PRECONDITION, d.update_id)
    reused = await refused(begin(calls, epoch, replace(draft(now + 1, forcing(1)), update_id=d.update_id)))
    assert reused.reason == "UPDATE_ID_REUSED"
    await abort(calls, epoch, d.update_id)


@pytest.mark.parametrize("until", ["begun", "uploaded", "sealed"])
async def test_an_abort_leaves_the_old_version_and_frees_the_update(calls: RawCalls, epoch: int, until: str) -> None:
    now = await version(calls)
    d = draft(now + 1)
    await begin(calls, epoch, d)
    if until != "begun":
        await send(calls, chunk(d, 0, len(d.shard)))
    if until == "sealed":
        await seal(calls, epoch, d.update_id)
    assert (await abort(calls, epoch, d.update_id)).state == pb.UPDATE_STATE_ABORTED
    assert (await abort(calls, epoch, d.update_id)).state == pb.UPDATE_STATE_ABORTED
    assert (await refused(send(calls, chunk(d, 0, 10)))).code is grpc.StatusCode.FAILED_PRECONDITION
    assert (await refused(commit(calls, epoch, d.update_id, now))).code is grpc.StatusCode.FAILED_PRECONDITION
    assert await version(calls) == now
    assert (await refused(abort(calls, epoch, "unknown"))).code is grpc.StatusCode.NOT_FOUND


async def test_an_update_is_aborted_when_its_lease_runs_out(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    await begin(calls, epoch, d, lease=Duration(nanos=200_000_000))
    await asyncio.sleep(0.4)
    assert await state(calls, d.update_id) == "ABORTED"


async def test_an_update_larger_than_the_memory_is_refused_at_begin(tmp_path: object) -> None:
    with ReferenceServer("--vocab-size", str(1 << 20)) as server:
        async with raw_calls(server) as calls:
            info = await calls.engine.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=10)
            layout = tuple(wire.layout_from_pb(t) for t in info.model.tensors)
            d = draft(1, layout=layout)
            far = replace(d.manifest.tensors[-1], offset=1 << 50)
            d.manifest = replace(d.manifest, tensors=(*d.manifest.tensors[:-1], far))
            error = await refused(begin(calls, await calls.epoch(), d))
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL")
            assert len((await calls.generate(ask(2))).tokens()) == 2


@pytest.mark.parametrize(
    ("field", "value", "capability"),
    [
        ("transport", pb.Transport(file=pb.FileTransport(uri="/x")), "transports"),
        ("transport", pb.Transport(collective=pb.CollectiveTransport(backend="nccl")), "transports"),
        ("kind", "overwrite", "delta"),
    ],
)
async def test_kinds_and_transports_that_are_not_offered_are_named(
    calls: RawCalls, epoch: int, field: str, value: object, capability: str
) -> None:
    d = draft(await version(calls) + 1)
    fields = {field: value}
    if field == "kind":
        manifest = wire.manifest_to_pb(d.manifest)
        getattr(manifest, str(value)).SetInParent()
        fields = {"manifest": manifest}
    error = await refused(begin(calls, epoch, d, **fields))
    assert (error.code, error.details["capability"]) == (grpc.StatusCode.UNIMPLEMENTED, capability)


def maps(server: ReferenceServer) -> str:
    return Path(f"/proc/{server.process.pid}/maps").read_text()
