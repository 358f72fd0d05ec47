"""Items 41 to 43, 47 and 48: deltas, fenced trainers, bad chunks, aborted updates and leases."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from skyrl_rollout.conformance import made_weights
from skyrl_rollout.conformance.item import Failed, expect
from skyrl_rollout.conformance.items.load import memory_nbytes
from skyrl_rollout.conformance.items.updates import PRECONDITION, sample
from skyrl_rollout.conformance.stubs import outcome, refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.conformance.trainer import Draft, Trainer
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, TensorSpec, content_digest

INVALID, OUT_OF_RANGE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE
LEASE_S = 0.4
SLACK_BYTES = 64 << 20
FEWEST, MOST = 5, 60  # updates: as many as make a leak larger than the slack


async def deltas_know_their_base(target: Target) -> None:
    """Item 41."""
    target.need("delta")
    trainer = await target.trainer()
    version = await trainer.version() + 2  # so that the one below is no version 0, over which there is no delta
    full = made_weights.noise(target.layout, version)
    await trainer.publish(target.noise(version))
    changed = delta(target.layout[0], full, version + 1, version)
    for base in (version - 1, version + 5):
        wrong = Draft(replace(changed.manifest, base_version=base), changed.shard)
        error = await refused(trainer.begin(wrong), PRECONDITION, what=f"a delta over {base} where {version} serves")
        expect(
            error.details.get("current_version") == str(version),
            f"ErrorInfo.metadata is {error.details}, expected current_version {version}",
        )
    before = await sample(target)
    await trainer.publish(changed)
    once = await sample(target)
    expect(once[:2] != before[:2], "a delta was committed and the output is the same")
    await trainer.publish(delta(target.layout[0], full, version + 2, version + 1))
    twice = await sample(target)
    expect(twice[:2] == once[:2], "the same delta applied twice gives another output than once")
    expect(twice[2] == version + 2, f"version {twice[2]} serves after the second delta, expected {version + 2}")


def delta(layout: TensorLayout, full: Mapping[str, bytes], version: int, base: int) -> Draft:
    """Every third element of one tensor, negated and doubled."""
    whole = np.frombuffer(full[layout.name], f"<u{layout.nbytes // int(np.prod(layout.shape))}").copy()
    values = np.random.default_rng(5).standard_normal(layout.shape).astype(np.float32) * 3
    new = np.frombuffer(made_weights.to_bytes(values, layout.dtype), whole.dtype)
    index = np.arange(0, len(whole), 3, dtype="<i4")
    whole[index] = new[index]
    encoded = index.tobytes() + whole[index].tobytes()
    spec = TensorSpec(layout, 0, 0, content_digest(whole.tobytes()), len(encoded))
    return Draft(Manifest(version, (spec,), base_version=base), encoded)


async def zombies_are_fenced(target: Target) -> None:
    """Item 42."""
    zombie = await target.trainer()
    version = await zombie.version()
    update = target.noise(version + 1)
    await zombie.begin(update)
    owner = await target.trainer()
    expect(
        owner.epoch > zombie.epoch, f"AcquireControl minted {owner.epoch} after {zombie.epoch}, expected a higher one"
    )
    state = await owner.state(update.update_id)
    expect(state == "ABORTED", f"the update of a fenced trainer is {state}, expected ABORTED")
    engine = target.stubs.engine
    fence = zombie.fence
    calls: dict[str, Any] = {
        "Pause": zombie.pause(control_pb2.PAUSE_MODE_KEEP),
        "Resume": zombie.resume("any"),
        "ResetCache": engine.ResetCache(control_pb2.ResetCacheRequest(fence=fence())),
        "Sleep": engine.Sleep(control_pb2.SleepRequest(fence=fence(), level=control_pb2.SleepRequest.LEVEL_DISCARD)),
        "WakeUp": engine.WakeUp(control_pb2.WakeUpRequest(fence=fence())),
        "BeginUpdate": zombie.begin(target.noise(version + 1)),
        "PullUpdate": zombie.pull(update),
        "SealUpdate": zombie.seal(update),
        "CommitUpdate": zombie.commit(update, version),
        "AbortUpdate": zombie.abort(update),
        "AcquireControl": engine.AcquireControl(
            control_pb2.AcquireControlRequest(owner="zombie", claim_epoch=zombie.epoch)
        ),
    }
    for name, call in calls.items():
        error = await refused(call, grpc.StatusCode.ABORTED, what=f"{name} by a fenced trainer")
        expect(error.reason == "FENCED", f"{name}: ErrorInfo.reason is {error.reason}, expected FENCED")
    expect((await target.stubs.info()).highest_trainer_epoch == owner.epoch, "GetServerInfo has another highest epoch")
    expect(await owner.version() == version, "a fenced trainer moved the version")
    second = target.noise(version + 1)
    await owner.begin(second)
    higher = Trainer(target.stubs, owner.epoch + 5, owner.chunk_bytes)
    pause = await higher.pause(control_pb2.PauseMode.Value("PAUSE_MODE_ABORT"))
    state = await higher.state(second.update_id)
    expect(state == "ABORTED", f"a higher epoch took over, the open update is {state}, expected ABORTED")
    await higher.resume(pause.pause_id)


async def bad_chunks_are_refused(target: Target) -> None:
    """Item 43."""
    trainer = await target.trainer()
    version = await trainer.version()
    update = target.noise(version + 1)
    await trainer.begin(update)
    size, limit = len(update.shard), target.info.limits.max_chunk_bytes
    first = min(1024, size // 4)
    await trainer.upload(update, 0, first)
    await refused(
        trainer.send(trainer.chunk(update, first + 16, first + 32)), OUT_OF_RANGE, INVALID, what="a chunk after a hole"
    )
    await refused(
        trainer.send(trainer.chunk(update, first - 16, first + 16)), INVALID, OUT_OF_RANGE, what="a chunk that overlaps"
    )
    await refused(
        trainer.send(trainer.chunk(update, 0, 64, offset=size)), INVALID, OUT_OF_RANGE, what="a chunk beyond the shard"
    )
    await refused(
        trainer.send(trainer.chunk(update, 0, 64, shard=9)), INVALID, OUT_OF_RANGE, what="a chunk of no such shard"
    )
    big = replace(update, shard=bytes(limit + 1))
    await refused(
        trainer.send(trainer.chunk(big, 0, limit + 1)),
        INVALID,
        OUT_OF_RANGE,
        what=f"a chunk of {limit + 1} bytes, above max_chunk_bytes,",
    )
    again = await trainer.send(trainer.chunk(update, 0, first))
    expect(again.durable_offset == first, f"a chunk sent twice moved durable_offset to {again.durable_offset}")
    await trainer.upload(update, first)
    await trainer.seal(update)
    await trainer.abort(update)


async def aborts_leave_the_old(target: Target) -> str | None:
    """Item 47."""
    trainer = await target.trainer()
    version = await trainer.version()
    before = await sample(target)
    for stage in ("OPEN", "half uploaded", "SEALED"):
        update = target.noise(version + 1)
        await trainer.begin(update)
        if stage != "OPEN":
            await trainer.upload(update, 0, len(update.shard) // 2)
        if stage == "SEALED":
            await trainer.upload(update, len(update.shard) // 2)
            await trainer.seal(update)
        for _ in range(2):
            reply = await trainer.abort(update)
            expect(reply.state == pb.UPDATE_STATE_ABORTED, f"AbortUpdate while {stage} left state {reply.state}")
        await refused(trainer.seal(update), PRECONDITION, what=f"SealUpdate after AbortUpdate while {stage}")
        await refused(trainer.commit(update, version), PRECONDITION, what="CommitUpdate after AbortUpdate")
        expect(await sample(target) == before, f"greedy output changed by AbortUpdate while {stage}")
    update, held = target.noise(version + 1), memory_nbytes(target)
    most = 2 * len(update.shard) + SLACK_BYTES
    times = min(max(2 * most // len(update.shard), FEWEST), MOST)
    for _ in range(times):
        again = Draft(update.manifest, update.shard)
        await trainer.begin(again)
        await trainer.upload(again)
        await trainer.abort(again)
    grown = memory_nbytes(target) - held
    expect(grown < most, f"the server grew by {grown >> 20} MiB over {times} aborted updates: memory is kept")
    await trainer.publish(update := target.noise(version + 1))
    await refused(trainer.abort(update), PRECONDITION, what="AbortUpdate of a committed update")
    return None if target.server else "its memory could not be seen: that needs a server that the suite launched"


async def lease_ends_an_update(target: Target) -> None:
    """Item 48."""
    trainer = await target.trainer()
    version = await trainer.version()
    update = target.noise(version + 1)
    lease = {"lease": {"nanos": int(LEASE_S * 1e9)}}
    await trainer.begin(update, **lease)
    await trainer.upload(update, 0, 1024)
    for _ in range(60):
        if (state := await trainer.state(update.update_id)) == "ABORTED":
            break
        await asyncio.sleep(0.1)
    else:
        raise Failed(f"an update with a lease of {LEASE_S} s is {state} after 6 s, expected ABORTED")
    await refused(
        trainer.upload(update, 1024, 2048), PRECONDITION, grpc.StatusCode.ABORTED, what="a chunk after the lease"
    )
    error = await outcome(trainer.begin(target.noise(version + 1), update_id=str(uuid.uuid4())))
    expect(error is None, f"after the lease of an update ran out none can begin: {error.message if error else ''}")
