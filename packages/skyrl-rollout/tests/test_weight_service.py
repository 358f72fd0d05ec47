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
    in_shards,
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

MIB = 1 << 20


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


async def test_a_large_update_is_refused_at_begin_or_its_memory_comes_back_with_an_abort() -> None:
    with ReferenceServer("--vocab-size", str(1 << 20)) as server:
        async with raw_calls(server) as calls:
            info = await calls.engine.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=10)
            epoch, d = await calls.epoch(), draft(1, layout=tuple(wire.layout_from_pb(t) for t in info.model.tensors))
            far = replace(d.manifest.tensors[-1], offset=1 << 50)
            huge = replace(d, manifest=replace(d.manifest, tensors=(*d.manifest.tensors[:-1], far)))
            error = await refused(begin(calls, epoch, huge))
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL")
            assert len((await calls.generate(ask(2))).tokens()) == 2
            chunks = [chunk(d, i, min(i + MIB, len(d.shard))) for i in range(0, len(d.shard), MIB)]
            for until in ("uploaded", "sealed"):
                update_id, before = f"large {until}", resident_nbytes(server)
                await begin(calls, epoch, replace(d, update_id=update_id))
                for c in chunks:
                    c.update_id = update_id
                await send(calls, *chunks)
                if until == "sealed":
                    await seal(calls, epoch, update_id)
                assert resident_nbytes(server) - before > 0.9 * len(d.shard)
                await abort(calls, epoch, update_id)
                assert resident_nbytes(server) - before < 0.5 * len(d.shard)  # the rest: gRPC keeps buffers


async def test_a_killed_server_leaves_the_trainers_memory_alone_and_knows_nothing_afterwards() -> None:
    d = draft(1, forcing(9))
    with shm_file(bytes(d.shard)) as name, ReferenceServer() as server:
        before = sorted(os.listdir("/dev/shm"))
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            await begin(calls, epoch, d, transport=shm_transport(name, len(d.shard)))
            await pull(calls, epoch, d.update_id)
        await asyncio.to_thread(server.kill)
        assert name in os.listdir("/dev/shm")
        assert set(os.listdir("/dev/shm")) <= set(before)
        with ReferenceServer() as again:
            async with raw_calls(again) as calls:
                assert await version(calls) == 0
                gone = calls.weights.GetUpdate(pb.GetUpdateRequest(update_id=d.update_id), timeout=5)
                assert (await refused(gone)).reason == "UNKNOWN_UPDATE"


@pytest.mark.parametrize("compression", [pb.COMPRESSION_NONE, pb.COMPRESSION_ZSTD])
async def test_shards_travel_beside_each_other(calls: RawCalls, epoch: int, compression: int) -> None:
    now = await version(calls)
    embed = np.random.default_rng(1).random((64, 16), np.float32)
    d, shards = in_shards(draft(now + 1, forcing(22) | {"model.embed_tokens.weight": embed}))
    await begin(calls, epoch, d, compression=compression)

    def chunks(shard: int) -> list[pb.UploadChunksRequest]:
        made, size = [], len(shards[shard]) // 3 + 1
        for start in range(0, len(shards[shard]), size):
            data = shards[shard][start : start + size]
            data = zstandard.compress(data) if compression == pb.COMPRESSION_ZSTD else data
            made.append(chunk(replace(d, shard=bytearray(data)), 0, len(data), shard=shard, offset=start))
        return made

    first = chunks(0)
    await send(calls, *first[:1])
    unfinished = await refused(seal(calls, epoch, d.update_id))
    assert (unfinished.code, "{0:" in unfinished.message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    replies = await asyncio.gather(*(send(calls, *chunks(shard)) for shard in range(len(shards))))
    assert [(r.shard, r.durable_offset) for r in replies] == [(i, len(s)) for i, s in enumerate(shards)]
    first[0].shard = 9
    unknown = await refused(send(calls, first[0]))
    assert (unknown.code, "shard 9" in unknown.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    assert (await calls.generate(ask(3))).tokens() == [22] * 3


async def test_a_manifest_at_odds_with_itself_is_refused(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    good = draft(now + 1)
    first, second, third = good.manifest.tensors
    for tensors, said in (
        ((first, second, second), "twice"),
        ((first, replace(second, offset=first.offset + 4), third), "overlap"),
        ((first, second, replace(third, content_digest=b"short")), "content_digest"),
        ((), "names no tensor"),
    ):
        d = replace(good, manifest=replace(good.manifest, tensors=tensors))
        error = await refused(begin(calls, epoch, d))
        assert (error.code, said in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.message
    manifest = wire.manifest_to_pb(good.manifest)
    manifest.digest = bytes(16)
    assert "manifest.digest" in (await refused(begin(calls, epoch, good, manifest=manifest))).message
    for fields, said in (
        ({"transport": pb.Transport()}, "set one of inline"),
        ({"compression": 9}, "compression is 9"),
        ({"update_id": ""}, "update_id"),
        ({"lease": Duration(seconds=90_000)}, "at most 86400"),
    ):
        error = await refused(begin(calls, epoch, good, **fields))
        assert (error.code, said in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.message
    assert (await calls.status()).open_update_id == ""


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


def resident_nbytes(server: ReferenceServer) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def maps(server: ReferenceServer) -> str:
    return Path(f"/proc/{server.process.pid}/maps").read_text()
