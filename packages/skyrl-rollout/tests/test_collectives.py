"""Weights that an engine receives by itself: in which order, and what a group that fails leaves behind."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from collective_server import broadcast, gloo_group
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from raw_calls import RawCalls, ask, fence, raw_calls, refused
from raw_updates import (
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
    state,
    version,
)
from skyrl_rollout.reference.process import ServedProcess
from skyrl_rollout.server.engine import CollectiveTransfer
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import weights_pb2 as pb

SCRIPT = str(Path(__file__).with_name("collective_server.py"))
READY = pb.PullUpdateResponse.PHASE_READY


def serving(engine: str) -> ServedProcess:
    return ServedProcess([sys.executable, SCRIPT, engine])


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with serving("Collecting") as process:
        yield process


def collective(port: int = 29_500, **fields: object) -> pb.Transport:
    given = {"backend": "gloo", "master_addr": "127.0.0.1", "master_port": port, "world_size": 2, "rank_offset": 1}
    return pb.Transport(collective=pb.CollectiveTransport(**(given | fields)))


def undigested(d: Draft) -> Draft:
    """Nobody in the server sees the bytes of a collective update, so nothing is promised about them."""
    return replace(
        d,
        manifest=replace(d.manifest, tensors=tuple(replace(t, content_digest=b"") for t in d.manifest.tensors)),
    )


def handle(tensor: str, token: int, **fields: object) -> pb.CudaIpcHandle:
    uuid = "GPU-5a1e9a4c-0001-4d2f-9c39-000000000000"
    return pb.CudaIpcHandle(**({"tensor": tensor, "device_uuid": uuid, "handle": bytes([token]) * 64} | fields))


async def test_nothing_changes_before_the_commit_and_everything_with_it(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    await published(calls, epoch, draft(now + 1, forcing(3)))
    d = undigested(draft(now + 2))
    assert not (await begin(calls, epoch, d, transport=collective())).staged
    early = await refused(seal(calls, epoch, d.update_id))
    assert (early.code, "PHASE_READY" in early.message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert [m.phase for m in await pull(calls, epoch, d.update_id)] == [READY]
    assert [m.phase for m in await pull(calls, epoch, d.update_id)] == [READY]
    await seal(calls, epoch, d.update_id)
    assert (await calls.generate(ask(3))).tokens() == [3] * 3
    running = asyncio.create_task(calls.generate(ask(80)))
    while not (await calls.status()).running:
        await asyncio.sleep(0.002)
    reply = await commit(calls, epoch, d.update_id, now + 1)
    answer = await running
    (_, cut, first, _), (_, rest, second, _) = answer.spans()
    assert (reply.weight_version, first, second) == (now + 2, now + 1, now + 2)
    assert answer.tokens() == [3] * cut + [37] * rest
    assert (await commit(calls, epoch, d.update_id, now + 1)) == reply


async def test_content_that_nobody_saw_is_never_taken_for_the_same(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = undigested(draft(now + 1))
    await begin(calls, epoch, d, transport=collective())
    await pull(calls, epoch, d.update_id)
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    again = await refused(begin(calls, epoch, replace(d, update_id="again"), transport=collective()))
    assert again.reason == "VERSION_CONFLICT"


@pytest.mark.parametrize("until", ["begun", "joined", "sealed"])
async def test_an_abort_leaves_the_group_and_the_old_version(calls: RawCalls, epoch: int, until: str) -> None:
    now = await version(calls)
    d = undigested(draft(now + 1))
    await begin(calls, epoch, d, transport=collective())
    if until != "begun":
        await pull(calls, epoch, d.update_id)
    if until == "sealed":
        await seal(calls, epoch, d.update_id)
    await abort(calls, epoch, d.update_id)
    assert await version(calls) == now
    other = undigested(draft(now + 1))
    await begin(calls, epoch, other, transport=collective())
    await pull(calls, epoch, other.update_id)
    await abort(calls, epoch, other.update_id)


async def test_a_group_that_does_not_come_about_by_the_deadline_aborts_the_update() -> None:
    with serving("NeverJoins") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            for _ in range(2):
                d = undigested(draft(1))
                await begin(calls, epoch, d, transport=collective())
                request = pb.PullUpdateRequest(fence=fence(epoch), update_id=d.update_id)
                late = await refused(calls.weights.PullUpdate(request, timeout=0.3))
                assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
                while await state(calls, d.update_id) == "OPEN":
                    await asyncio.sleep(0.01)
                assert await state(calls, d.update_id) == "ABORTED"
            await published(calls, epoch, draft(1, forcing(8)))
            assert (await calls.generate(ask(3))).tokens() == [8] * 3


async def test_another_trainer_may_take_over_while_an_engine_joins() -> None:
    with serving("NeverJoins") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            d = undigested(draft(1))
            await begin(calls, epoch, d, transport=collective())
            joining = asyncio.create_task(refused(pull(calls, epoch, d.update_id)))
            await asyncio.sleep(0.1)
            higher = await calls.epoch("the next trainer")
            assert (await joining).reason == "WRONG_STATE"
            assert await state(calls, d.update_id) == "ABORTED"
            await published(calls, higher, draft(1, forcing(8)))
            assert (await calls.generate(ask(3))).tokens() == [8] * 3


async def test_a_group_that_cannot_be_joined_is_told_in_the_engines_words() -> None:
    with serving("CannotJoin") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            d = undigested(draft(1))
            await begin(calls, epoch, d, transport=collective())
            error = await refused(pull(calls, epoch, d.update_id))
            assert "no route to 127.0.0.1" in error.message
            assert await state(calls, d.update_id) == "ABORTED"
            assert len((await calls.generate(ask(3))).tokens()) == 3


async def test_a_trainer_that_never_sends_poisons_the_server_when_the_lease_is_over() -> None:
    with serving("NeverReceives") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            d = undigested(draft(1))
            await begin(calls, epoch, d, transport=collective(), lease=Duration(nanos=300_000_000))
            await pull(calls, epoch, d.update_id)
            await seal(calls, epoch, d.update_id)
            error = await refused(commit(calls, epoch, d.update_id, 0))
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POISONED")
            assert (await calls.status()).state == control_pb2.ENGINE_STATE_POISONED
            assert await state(calls, d.update_id) == "FAILED"
            health = await calls.health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"master_addr": ""}, "master_addr"),
        ({"master_port": 0}, "master_port is 0"),
        ({"master_port": 70_000}, "master_port is 70000"),
        ({"rank_offset": 0}, "rank 0 is the trainer"),
        ({"rank_offset": 2}, "world_size is 2"),
    ],
)
async def test_a_group_that_cannot_be_is_refused_at_begin(
    calls: RawCalls, epoch: int, fields: dict[str, object], named: str
) -> None:
    d = undigested(draft(await version(calls) + 1))
    error = await refused(begin(calls, epoch, d, transport=collective(**fields)))  # type: ignore[arg-type]
    assert (error.code, named in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_what_a_collective_cannot_carry_is_refused(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = undigested(draft(now + 1))
    other = await refused(begin(calls, epoch, d, transport=collective(backend="nccl")))
    assert (other.code, other.details["capability"]) == (grpc.StatusCode.UNIMPLEMENTED, "transports")
    await begin(calls, epoch, d, transport=collective())
    assert (await refused(send(calls, chunk(d, 0, 10)))).code is grpc.StatusCode.FAILED_PRECONDITION
    await abort(calls, epoch, d.update_id)
    assert "content_digest" in (await refused(begin(calls, epoch, undigested(draft(now + 1))))).message
    delta = delta_draft(now + 1, now, {}, {})
    assert (await refused(begin(calls, epoch, delta, transport=collective()))).code is grpc.StatusCode.UNIMPLEMENTED


async def test_ipc_handles_travel_as_raw_bytes_of_a_device(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = undigested(draft(now + 1))
    names = [t.layout.name for t in d.manifest.tensors]
    good = [handle(name, 21) for name in names]

    def ipc(handles: list[pb.CudaIpcHandle]) -> pb.Transport:
        return pb.Transport(cuda_ipc=pb.CudaIpcTransport(handles=handles))

    for bad, named in (
        (good[1:], names[0]),
        ([*good, handle("alien.weight", 1)], "alien.weight"),
        ([*good, good[0]], "twice"),
        ([handle(names[0], 21, handle=bytes(63)), *good[1:]], "63 bytes"),
        ([handle(names[0], 21, device_uuid="0"), *good[1:]], "device_uuid"),
        ([handle(names[0], 21, device_uuid="GPU-1\n"), *good[1:]], "device_uuid"),
    ):
        error = await refused(begin(calls, epoch, d, transport=ipc(bad)))
        assert (error.code, named in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.message
    await begin(calls, epoch, d, transport=ipc(good))
    await pull(calls, epoch, d.update_id)
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    assert (await calls.generate(ask(3))).tokens() == [21] * 3


@pytest.mark.ci
async def test_two_processes_broadcast_weights_over_gloo() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving("Gloo") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            for target in (1, 2):
                d = undigested(draft(target, forcing(10 + target)))
                await begin(calls, epoch, d, transport=collective(port))
                transfer = CollectiveTransfer("gloo", "127.0.0.1", port, 2)
                group, told = await asyncio.gather(
                    asyncio.to_thread(gloo_group, transfer, 0), pull(calls, epoch, d.update_id)
                )
                assert [m.phase for m in told] == [READY]
                await seal(calls, epoch, d.update_id)
                committing = asyncio.create_task(commit(calls, epoch, d.update_id, target - 1))
                await asyncio.to_thread(broadcast, group, d)
                assert (await committing).weight_version == target
                assert (await calls.generate(ask(3))).tokens() == [10 + target] * 3
                del group
