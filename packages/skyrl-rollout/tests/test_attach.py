"""Broken connections: a generation goes on where it was, starts over on a new process, or ends with a reason."""

import asyncio
import socket
import time

import pytest
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import ServerUnreachable
from skyrl_rollout.events import Delta, Heartbeat, Started
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling
from tcp_proxy import TcpProxy

RAW = LogprobMode.RAW
SAMPLING = Sampling(max_tokens=300, seed=11, ignore_eos=True)
PROMPT = [4, 5, 6]


@pytest.fixture(scope="module")
def server():
    with ReferenceServer("--token-delay-ms", "2") as running:
        yield running


@pytest.fixture
async def proxy(server):
    async with TcpProxy(server.url) as running:
        yield running


async def test_a_connection_cut_again_and_again_loses_and_repeats_nothing(server, proxy):
    async with await RolloutClient.connect(server.url) as direct, await RolloutClient.connect(proxy.url) as client:
        whole = await direct.generate(PROMPT, SAMPLING, mode=RAW, timeout_s=30, num_samples=2)
        numbers, cuts = [], 0
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async for event in client.generate_events(
            PROMPT, SAMPLING, mode=RAW, timeout_s=30, num_samples=2, tokens_per_event=16
        ):
            if isinstance(event, Heartbeat):
                continue
            numbers.append(event.seq)
            if isinstance(event, Delta):
                assert event.offset == len(tokens[event.sample_index])
                tokens[event.sample_index] += event.token_ids.tolist()
                if event.seq % 9 == 0:
                    proxy.cut()
                    cuts += 1
    assert numbers == list(range(1, len(numbers) + 1))
    assert cuts >= 3 and proxy.connections > cuts
    assert [tokens[i] for i in (0, 1)] == [s.token_ids.tolist() for s in whole.samples]


async def test_a_generation_cut_in_its_middle_is_assembled_as_if_it_had_not_been(server, proxy):
    async with await RolloutClient.connect(proxy.url) as client:
        asyncio.get_running_loop().call_later(0.2, proxy.cut)
        cut = await client.generate(PROMPT, SAMPLING, mode=RAW, timeout_s=30)
        whole = await client.generate(PROMPT, SAMPLING, mode=RAW, timeout_s=30)
    assert proxy.connections == 2 and cut.num_restarts == 0
    assert cut.samples[0].token_ids.tolist() == whole.samples[0].token_ids.tolist()


async def test_a_connection_that_falls_silent_counts_as_broken(proxy):
    async with await RolloutClient.connect(proxy.url, heartbeat_s=0.1) as client:
        tokens = 0
        async for event in client.generate_events(PROMPT, SAMPLING, mode=RAW, timeout_s=30, tokens_per_event=16):
            if isinstance(event, Delta):
                tokens += len(event.token_ids)
                if event.seq == 4:
                    proxy.silent = True
                    asyncio.get_running_loop().call_later(1.0, _wake, proxy)
    assert tokens == 300


def _wake(proxy: TcpProxy) -> None:
    proxy.silent = False
    proxy.cut()


async def test_without_a_grace_a_break_is_an_error(proxy):
    async with await RolloutClient.connect(proxy.url) as client:
        asyncio.get_running_loop().call_later(0.2, proxy.cut)
        with pytest.raises(ServerUnreachable):
            await client.generate(PROMPT, SAMPLING, mode=RAW, timeout_s=30, detach_grace_s=0)


async def test_a_server_that_stays_away_is_named_before_the_timeout(proxy):
    async with await RolloutClient.connect(proxy.url) as client:
        began = time.monotonic()
        asyncio.get_running_loop().call_later(0.1, _leave, proxy)
        with pytest.raises(ServerUnreachable, match=f"no rollout server answers at {proxy.url}: tried Generate"):
            await client.generate(PROMPT, SAMPLING, mode=RAW, timeout_s=60, unreachable_s=1.0)
        assert 1.0 < time.monotonic() - began < 6.0


def _leave(proxy: TcpProxy) -> None:
    proxy.refusing = True
    proxy.cut()


async def test_a_server_process_that_is_replaced_makes_the_run_start_over_and_says_so(caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    with ReferenceServer("--token-delay-ms", "2", "--seed", "1", listen=listen) as first:
        async with await RolloutClient.connect(first.url) as client:
            task = asyncio.create_task(
                client.generate(PROMPT, SAMPLING, mode=RAW, timeout_s=60, on_progress=lambda n: None)
            )
            await asyncio.sleep(0.3)
            first.kill()
            with ReferenceServer("--seed", "2", listen=listen) as second:
                generation = await task
                anew = await client.generate(PROMPT, SAMPLING, mode=RAW, timeout_s=30)
                assert (await client.refresh()).instance_id == generation.instance_id
                assert second.alive
    assert generation.num_restarts == 1 and "starts over" in caplog.text
    assert generation.samples[0].token_ids.tolist() == anew.samples[0].token_ids.tolist()
    assert generation.samples[0].finish_reason is FinishReason.LENGTH


async def test_a_replay_from_the_start_is_one_run(server):
    async with await RolloutClient.connect(server.url) as client:
        for _ in range(2):
            events = client.generate_events(PROMPT, SAMPLING, mode=RAW, timeout_s=30, request_id="replayed")
            kinds = [type(e) async for e in events]
            assert kinds.count(Started) == 1 and kinds[0] is Started
