"""A trainer that is killed holds nothing for longer than its lease, and one that comes back late changes nothing."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from raw_calls import Answer, RawCalls, ask, raw_calls
from raw_updates import draft, forcing, published, state, version
from scripted_process import ScriptedProcess
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2
from trainer_process import LEASE_S

SERVING, PAUSED = control_pb2.ENGINE_STATE_SERVING, control_pb2.ENGINE_STATE_PAUSED
SLACK_S = 3.0


@pytest.fixture
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--token-delay-ms", "5") as process:
        yield process


@pytest.fixture
async def calls(server: ReferenceServer):
    """Serving version 1, under which the server says 7."""
    async with raw_calls(server) as opened:
        await published(opened, await opened.epoch(), draft(1))
        yield opened


async def running(calls: RawCalls, count: int) -> asyncio.Task[Answer]:
    task = asyncio.create_task(calls.generate(ask(count)))
    while not (await calls.status()).running:
        await asyncio.sleep(0.01)
    return task


async def test_what_a_killed_trainer_held_ends_with_its_lease_and_frozen_work_ends_whole(
    server: ReferenceServer, calls: RawCalls
) -> None:
    whole = await calls.generate(ask(200))
    async with ScriptedProcess("trainer_process.py", "holds", server.url) as trainer:
        assert await trainer.line() == "ready"
        task = await running(calls, 200)
        await trainer.tell("hold")
        update_id = await trainer.line()
        held_at = time.monotonic()
        await trainer.kill()
    held = await calls.status()
    assert (held.state, held.frozen, held.open_update_id) == (PAUSED, 1, update_id)
    await asyncio.sleep(LEASE_S / 2)
    assert (await calls.status()).tokens_generated == held.tokens_generated, "its lease still counts"
    while (now := await calls.status()).state != SERVING or now.open_update_id:
        assert time.monotonic() < held_at + LEASE_S + SLACK_S, "the lease is over and the server is still held"
        await asyncio.sleep(0.02)
    assert await state(calls, update_id) == "ABORTED"
    answer = await task
    assert answer.tokens() == whole.tokens() and len(answer.tokens()) == 200
    np.testing.assert_array_equal(answer.logprobs(), whole.logprobs())
    assert answer.spans() == [(0, 200, 1, 1)]
    await published(calls, await calls.epoch("the next one"), draft(2, forcing(9)))
    assert (await calls.generate(ask(3))).tokens() == [9] * 3


async def test_a_zombie_that_had_sealed_is_fenced_from_commit_pause_and_sleep_and_ends_with_that_error(
    server: ReferenceServer, calls: RawCalls
) -> None:
    async with ScriptedProcess("trainer_process.py", "commits", server.url) as zombie:
        update_id = await zombie.line()
        zombie.send(signal.SIGSTOP)
        await published(calls, await calls.epoch("the heir"), draft(2, forcing(9)))
        task = await running(calls, 200)
        zombie.send(signal.SIGCONT)
        await zombie.tell("go on")
        assert await zombie.line() == "ABORTED/FENCED ABORTED/FENCED ABORTED/FENCED"
        code, said = await zombie.end()
    assert code == 1 and "Fenced: trainer epoch 2 is fenced: this server is owned by epoch 3 (the heir)" in said
    assert await state(calls, update_id) == "ABORTED"
    answer = await task
    assert (answer.tokens(), answer.spans()) == ([9] * 200, [(0, 200, 2, 2)])
    assert (await version(calls), (await calls.status()).state) == (2, SERVING)


async def test_a_zombie_in_the_middle_of_its_publish_ends_with_fenced_and_nothing_of_it_is_served(
    server: ReferenceServer, calls: RawCalls
) -> None:
    async with ScriptedProcess("trainer_process.py", "publishes", server.url) as zombie:
        assert await zombie.line() == "copied"
        zombie.send(signal.SIGSTOP)
        await published(calls, await calls.epoch("the heir"), draft(2, forcing(9)))
        zombie.send(signal.SIGCONT)
        await zombie.tell("go on")
        code, said = await zombie.end()
    assert code == 1 and "Fenced: trainer epoch 2 is fenced" in said.splitlines()[-1]
    status = await calls.status()
    assert (status.state, status.open_update_id, dict(status.weight_versions)) == (SERVING, "", {"": 2})
    assert (await calls.generate(ask(3))).tokens() == [9] * 3
