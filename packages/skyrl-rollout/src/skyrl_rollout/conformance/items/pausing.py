"""Items 30 to 33: pauses, their leases, and the cache."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import grpc

from skyrl_rollout.conformance.item import Failed, NotOffered, expect
from skyrl_rollout.conformance.stubs import refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.v1 import control_pb2

AT_ONCE_S = 1.0
LEASE_S = 0.5


def a_mode(target: Target) -> control_pb2.PauseMode:
    """A pause mode that the server offers, KEEP where it can. Raises NotOffered."""
    offered = list(target.info.capabilities.pause_modes)
    for mode in (control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_ABORT, control_pb2.PAUSE_MODE_WAIT):
        if mode in offered:
            return mode
    raise NotOffered("pause_modes")


async def pauses_are_idempotent(target: Target) -> None:
    """Item 30."""
    trainer, mode, op_id = await target.trainer(), a_mode(target), str(uuid.uuid4())
    first = await trainer.pause(mode, op_id=op_id)
    second = await trainer.pause(mode, op_id=op_id)
    expect(first == second, f"Pause, repeated with its op_id, answered {second}, not {first}".replace("\n", " "))
    wrong = f"resuming another pause than {first.pause_id}"
    await refused(trainer.resume(str(uuid.uuid4())), grpc.StatusCode.NOT_FOUND, what=wrong)
    state = (await target.stubs.status()).state
    expect(state == control_pb2.ENGINE_STATE_PAUSED, f"state is {state} after {wrong}, expected PAUSED")
    op_id = str(uuid.uuid4())
    replies = [await trainer.resume(first.pause_id, op_id=op_id) for _ in range(2)]
    expect(replies[0] == replies[1], "Resume, repeated with its op_id, gave another answer")
    answer = await target.answer(target.ask(4))
    expect(len(answer.tokens()) == 4, "no tokens after Resume")


async def lease_ends_a_pause(target: Target) -> None:
    """Item 31."""
    trainer = await target.trainer()
    reading = target.read(target.ask_long())
    await reading.tokens(2)
    await trainer.pause(a_mode(target), lease_s=LEASE_S)
    began = time.monotonic()
    answer = await target.answer(target.ask(4), timeout_s=10)
    waited = time.monotonic() - began
    expect(len(answer.tokens()) == 4, "no tokens after the lease of a pause ran out")
    expect(waited >= LEASE_S / 2, f"a request was served {waited:.2f} s into a pause with a lease of {LEASE_S} s")
    state = (await target.stubs.status()).state
    expect(state == control_pb2.ENGINE_STATE_SERVING, f"state is {state} after the lease, expected SERVING")
    reading.drop()


async def reject_refuses_at_once(target: Target) -> None:
    """Item 32."""
    trainer = await target.trainer()
    pause = await trainer.pause(a_mode(target), admission=control_pb2.ADMISSION_REJECT)
    began = time.monotonic()
    await refused(
        target.read(target.ask(4)).call,
        grpc.StatusCode.UNAVAILABLE,
        what="a request during a pause with ADMISSION_REJECT",
    )
    took = time.monotonic() - began
    expect(took < AT_ONCE_S, f"the refusal took {took:.2f} s, expected it at once")
    await trainer.resume(pause.pause_id)
    await target.answer(target.ask(2))


async def cache_reset_says_so(target: Target) -> None:
    """Item 33."""
    target.need("reset_cache")
    trainer = await target.trainer()
    await target.answer(target.ask(4, prompt=target.prompt(64)))
    reply = await reset(target, trainer.fence())
    first = await target.answer(target.ask(4, prompt=target.prompt(64)))
    expect(first.began.cached_prompt_tokens == 0, f"cached_prompt_tokens is not 0 after ResetCache ({reply})")
    reading = target.read(target.ask_long())
    await reading.tokens(2)
    await refused(
        reset(target, trainer.fence()),
        grpc.StatusCode.FAILED_PRECONDITION,
        what="ResetCache without preempt_running while a request runs",
    )
    await reset(target, trainer.fence(), preempt_running=True)
    have = len(reading.answer.tokens())
    await reading.tokens(have + 4)
    reading.drop()
    await asyncio.sleep(0)
    if reading.answer.finished:
        raise Failed("the running request ended by a ResetCache with preempt_running, expected it to go on")


def reset(target: Target, fence: control_pb2.Fence, **fields: bool) -> Any:
    """The call ResetCache."""
    return target.stubs.engine.ResetCache(control_pb2.ResetCacheRequest(fence=fence, **fields))
