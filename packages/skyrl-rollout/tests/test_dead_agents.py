"""An agent's process is killed in mid-stream: its slots come back at once, or are kept for its grace and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from agent_process import PROMPT, sampling
from raw_calls import RawCalls, ask
from scripted_process import ScriptedProcess
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode

SLOTS = 2
FREED_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    """A token every 5 ms, for two samples at a time."""
    with ReferenceServer("--token-delay-ms", "5", "--max-running", str(SLOTS)) as process:
        yield process


def agent(server: ReferenceServer, request_id: str, *, max_tokens: int, grace_s: float) -> ScriptedProcess:
    return ScriptedProcess("agent_process.py", server.url, request_id, str(max_tokens), str(grace_s), str(SLOTS))


async def test_without_a_grace_a_killed_agents_slots_are_free_within_two_seconds(
    server: ReferenceServer, calls: RawCalls
) -> None:
    async with agent(server, "doomed", max_tokens=4000, grace_s=0) as doomed:
        assert await doomed.line() == "running"
        waiting = asyncio.create_task(calls.generate(ask(20)))
        await asyncio.sleep(0.2)
        assert not waiting.done() and (await calls.status()).kv_usage == 1.0
        await doomed.kill()
        killed_at = time.monotonic()
        assert len((await waiting).tokens()) == 20
        assert time.monotonic() - killed_at < FREED_WITHIN_S
    status = await calls.status()
    assert (status.running, status.waiting, status.kv_usage) == (0, 0, 0.0)


async def test_within_its_grace_the_work_goes_on_and_after_it_the_slots_are_free(
    server: ReferenceServer, calls: RawCalls
) -> None:
    async with agent(server, "detached", max_tokens=4000, grace_s=1.0) as doomed:
        assert await doomed.line() == "running"
        await doomed.kill()
        killed_at = time.monotonic()
    before = await calls.status()
    await asyncio.sleep(0.5)
    during = await calls.status()
    assert during.running == 1 and during.tokens_generated > before.tokens_generated
    while (after := await calls.status()).running:
        assert time.monotonic() < killed_at + 1.0 + FREED_WITHIN_S
        await asyncio.sleep(0.02)
    assert time.monotonic() - killed_at > 0.9 and after.kv_usage == 0.0


async def test_the_agent_that_comes_back_within_its_grace_gets_every_token_of_the_one_execution(
    server: ReferenceServer, calls: RawCalls
) -> None:
    async with await RolloutClient.connect(server.url) as client:
        whole = await client.generate(PROMPT, sampling(200), mode=LogprobMode.SAMPLING, timeout_s=30, num_samples=SLOTS)
    before = (await calls.status()).tokens_generated
    async with agent(server, "restarted", max_tokens=200, grace_s=30) as killed:
        assert await killed.line() == "running"
        await killed.kill()
    async with agent(server, "restarted", max_tokens=200, grace_s=30) as again:
        assert await again.line() == "running"
        lines = [await again.line() for _ in range(SLOTS)]
    assert lines == [" ".join(map(str, s.token_ids)) for s in whole.samples]
    assert (await calls.status()).tokens_generated - before == SLOTS * 200, "nothing was made twice"
