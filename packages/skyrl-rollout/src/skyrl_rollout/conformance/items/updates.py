"""Items 34 to 40: new weights serve all at once or not at all, once, and never by halves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc

from skyrl_rollout.conformance import made_weights
from skyrl_rollout.conformance.answers import Answer
from skyrl_rollout.conformance.item import expect
from skyrl_rollout.conformance.stubs import refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.conformance.trainer import Trainer, draft
from skyrl_rollout.v1 import generation_pb2 as gen
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.manifest import TensorLayout

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
TOLD = 7
CROWD = 16


async def sample(target: Target) -> tuple[list[int], bytes, int]:
    """(tokens, logprob bytes, version) of a greedy answer that no cache has a part in."""
    answer: Answer = await target.answer(target.ask(16, cache=gen.CacheOptions(bypass=True)))
    return answer.tokens(), answer.logprobs().tobytes(), answer.version


async def old_weights_serve_bit_for_bit(target: Target) -> None:
    """Item 34."""
    trainer = await target.trainer()
    version = await trainer.version()
    before = await sample(target)
    update = target.noise(version + 1)
    await trainer.begin(update)
    half = len(update.shard) // 2
    await trainer.upload(update, 0, half)
    expect(await sample(target) == before, "greedy output changed while new weights were uploaded")
    await trainer.upload(update, half)
    expect(await sample(target) == before, "greedy output changed when new weights were uploaded")
    await trainer.seal(update)
    expect(await sample(target) == before, "greedy output changed by SealUpdate")
    await trainer.commit(update, version)
    after = await sample(target)
    expect(after[2] == version + 1, f"version {after[2]} serves after the commit of {version + 1}")
    expect(after[:2] != before[:2], "the output is the same after other weights were committed")


async def commit_reaches_everyone(target: Target) -> None:
    """Item 35. Version v says nothing but its own token, so one stale rank would be heard."""
    trainer = await target.trainer()
    first = await trainer.version() + 1
    running = target.read(target.ask_long())
    await running.tokens(1)
    for version, token in ((first, TOLD), (first + 1, TOLD + 1)):
        await trainer.publish(target.saying(version, token))
        answers = await asyncio.gather(
            *(target.answer(target.ask(6, prompt=target.prompt(seed=seed))) for seed in range(CROWD))
        )
        for answer in answers:
            expect(answer.version >= version, f"a request after the commit of {version} reports {answer.version}")
            expect(
                set(answer.tokens()) == {token},
                f"version {version} says only token {token}, a request after its commit got {answer.tokens()}",
            )
    running.drop()


async def flipped_byte_is_data_loss(target: Target) -> None:
    """Item 36."""
    trainer = await target.trainer()
    version = await trainer.version()
    before = await sample(target)
    update = target.noise(version + 1)
    await trainer.begin(update)
    await trainer.upload(update.flipped())
    await refused(trainer.seal(update), grpc.StatusCode.DATA_LOSS, what="SealUpdate after a flipped bit")
    await refused(trainer.commit(update, version), PRECONDITION, what="CommitUpdate of an update that was not sealed")
    expect(await sample(target) == before, "greedy output changed by an update that was corrupt")
    await refused(
        trainer.send(trainer.chunk(update, 0, 64, crc32c=1)),
        grpc.StatusCode.DATA_LOSS,
        what="a chunk whose crc32c is wrong",
    )
    await trainer.upload(update)
    await trainer.seal(update)
    await trainer.abort(update)


async def misfits_are_named(target: Target) -> None:
    """Item 37."""
    trainer = await target.trainer()
    version = await trainer.version()
    before = await sample(target)
    layout, weights = target.layout, made_weights.noise(target.layout, 1)
    last = layout[-1]
    bent = TensorLayout(last.name, last.dtype, (*last.shape, 1))
    recast = TensorLayout(last.name, "f16" if last.dtype != "f16" else "bf16", (*last.shape[:-1], last.shape[-1]))
    extra = TensorLayout("no.such.tensor", last.dtype, last.shape)
    wrong = {
        "a missing tensor": (layout[:-1], last.name),
        "an extra tensor": ((*layout, extra), extra.name),
        "a tensor of another shape": ((*layout[:-1], bent), last.name),
        "a tensor of another dtype": ((*layout[:-1], recast), last.name),
    }
    for what, (offered, name) in wrong.items():
        data = {t.name: weights.get(t.name, b"")[: t.nbytes].ljust(t.nbytes, b"\0") for t in offered}
        error = await refused(
            trainer.begin(draft(version + 1, data, offered)), grpc.StatusCode.INVALID_ARGUMENT, what=f"{what} at Begin"
        )
        named = [field for field, _ in error.violations if name in field]
        expect(bool(named), f"{what}: BadRequest names {[f for f, _ in error.violations][:3]}, expected {name}")
    expect(not (await target.stubs.status()).open_update_id, "a refused BeginUpdate left an update open")
    expect(await sample(target) == before, "greedy output changed by updates that were refused")


async def upload_resumes(target: Target) -> None:
    """Item 38."""
    trainer = await target.trainer()
    version = await trainer.version()
    update = target.noise(version + 1)
    await trainer.begin(update)
    part = len(update.shard) // 3
    async with target.opened() as other:
        cut = Trainer(other, trainer.epoch, trainer.chunk_bytes)
        await cut.upload(update, 0, part)
        stalled = other.weights.UploadChunks()
        await stalled.write(trainer.chunk(update, part, part + min(part, 4096)))
    reply = await target.stubs.weights.GetUpdate(pb.GetUpdateRequest(update_id=update.update_id))
    durable = reply.durable_offsets[0]
    expect(part <= durable < len(update.shard), f"durable_offset is {durable} after {part} bytes and a cut")
    await trainer.begin(update)
    done = await trainer.upload(update, durable)
    expect(done.durable_offset == len(update.shard), f"durable_offset is {done.durable_offset} of {len(update.shard)}")
    await trainer.seal(update)
    await trainer.commit(update, version)
    expect((await sample(target))[2] == version + 1, "the resumed update does not serve")


async def commit_twice_is_once(target: Target) -> None:
    """Item 39."""
    trainer = await target.trainer()
    version = await trainer.version()
    update = await trainer.stage(target.noise(version + 2))
    first = await trainer.commit(update, version)
    second = await trainer.commit(update, version)
    expect(first == second, "CommitUpdate, repeated, gave another answer")
    expect(
        (first.weight_version, first.previous_version) == (version + 2, version),
        f"the commit answers {first.previous_version} -> {first.weight_version}, expected {version} -> {version + 2}",
    )
    expect(await trainer.version() == version + 2, f"version {await trainer.version()} serves, expected {version + 2}")
    state = await trainer.state(update.update_id)
    expect(state == "COMMITTED", f"GetUpdate says {state}, expected COMMITTED")


async def versions_never_go_back(target: Target) -> None:
    """Item 40."""
    trainer = await target.trainer()
    version = await trainer.version() + 1
    committed = target.noise(version)
    await trainer.publish(committed)
    before = await sample(target)
    for target_version in (version - 1, version):
        error = await refused(
            trainer.begin(target.noise(target_version, seed=version + 77)),
            PRECONDITION,
            what=f"other content as version {target_version} over {version}",
        )
        expect(
            error.details.get("current_version") == str(version),
            f"ErrorInfo.metadata is {error.details}, expected current_version {version}",
        )
    again = replace(committed, update_id=committed.update_id + "-again")
    reply = await trainer.begin(again)
    expect(
        reply.state == pb.UPDATE_STATE_COMMITTED,
        f"the same content as the same version is {pb.UpdateState.Name(reply.state)}, expected COMMITTED",
    )
    expect(await trainer.version() == version, "a no-op moved the version")
    expect(await sample(target) == before, "a no-op changed the output")
