"""A replica is lost in mid-generation: what it made is kept, the rest comes from another one, all of it counted."""

import asyncio
import os
import signal
import socket

import numpy as np
import pytest
from skyrl_rollout import replicas
from skyrl_rollout.errors import DeadlineExceeded, ServerUnreachable
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights.manifest import TensorLayout
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher

pytestmark = pytest.mark.ci
RAW = LogprobMode.RAW
LONG = Sampling(max_tokens=250, min_tokens=180, seed=7)  # some end by themselves, after the loss
SLOW = ("--token-delay-ms", "3")


@pytest.fixture(autouse=True)
def _quick_failover(monkeypatch):
    monkeypatch.setattr(replicas, "FAILOVER_S", 0.4)
    monkeypatch.setattr(replicas, "SILENCE_S", 1.5)
    monkeypatch.setattr(replicas, "WATCH_INTERVAL_S", 0.1)
    monkeypatch.setattr("skyrl_rollout.failover.MAX_EVENT_DELAY_S", 0.1)


@pytest.fixture(scope="module")
def survivor():
    with ReferenceServer(*SLOW) as running:
        yield running


@pytest.fixture
def doomed():
    with ReferenceServer(*SLOW) as running:
        yield running


def groups(pool, sampling=LONG, *, count=4, **more):
    return [
        pool.generate([i, 1, 2], sampling, mode=RAW, timeout_s=60, num_samples=3, affinity=f"group {i}", **more)
        for i in range(count)
    ]


async def undisturbed(server, sampling=LONG, *, count=4):
    async with await RolloutPool.connect([server.url]) as pool:
        return await asyncio.gather(*groups(pool, sampling, count=count))


async def lost_on_the_way(urls, lose, sampling=LONG, *, after_s=0.25):
    """(generations, tokens that the other replicas have made meanwhile) of groups whose first replica `lose` takes."""
    async with await RolloutPool.connect(urls) as pool:
        before = [(await c.status()).tokens_generated for c in pool.clients[1:]]
        work = asyncio.gather(*groups(pool, sampling))
        await asyncio.sleep(after_s)
        lose()
        generations = await work
        made = [(await c.status()).tokens_generated for c in pool.clients[1:]]
    return generations, sum(made) - sum(before)


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a.samples, b.samples, strict=True):
            assert x.token_ids.tolist() == y.token_ids.tolist() and x.finish_reason is y.finish_reason
            np.testing.assert_array_equal(x.logprobs, y.logprobs)
            assert x.spans == y.spans and sum(s.length for s in x.spans) == len(x.token_ids) == len(x.weight_versions)


@pytest.mark.parametrize("lose", ["SIGKILL", "SIGSTOP", "SIGTERM"])
async def test_a_lost_replica_costs_no_token_that_had_arrived(survivor, doomed, lose):
    whole = await undisturbed(survivor)
    generations, made = await lost_on_the_way(
        [doomed.url, survivor.url], lambda: os.kill(doomed.pid, getattr(signal, lose))
    )
    if lose == "SIGSTOP":
        os.kill(doomed.pid, signal.SIGCONT)
    assert_equal(generations, whole)
    if lose == "SIGTERM":
        return  # it drains: 10 s are enough for what runs there to end by itself
    moved = [g for g in generations if g.num_moves]
    total = sum(len(s.token_ids) for g in generations for s in g.samples)
    kept = sum(g.num_kept_tokens for g in generations)
    assert len(moved) == 2 and kept > 0
    assert made == total - kept - sum(
        len(s.token_ids)
        for g in generations
        for s in g.samples
        if s.instance_ids == generations[0].samples[0].instance_ids[:1]
    ), "nothing is made twice"
    for g in moved:
        assert g.num_restarts == 0 and all(len(s.instance_ids) == 2 for s in g.samples)
        assert len({s.instance_ids for s in g.samples}) == 1, "a group stays together"


async def test_a_sample_that_had_finished_is_not_made_again(survivor, doomed):
    short = Sampling(max_tokens=2000, temperature=1.5, seed=3)  # token 0 ends a sample: lengths differ widely
    whole = await undisturbed(survivor, short, count=1)
    lengths = sorted(len(s.token_ids) for s in whole[0].samples)
    async with await RolloutPool.connect([doomed.url, survivor.url]) as pool:
        before = (await pool.clients[1].status()).tokens_generated
        work = asyncio.gather(*groups(pool, short, count=1))
        while (await pool.clients[0].status()).tokens_generated < lengths[0] * 3 + 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)
        doomed.kill()
        (generation,) = await work
        made = (await pool.clients[1].status()).tokens_generated - before
    assert_equal([generation], whole)
    served_by = [len(s.instance_ids) for s in generation.samples]
    assert sorted(served_by) != [2, 2, 2], "one had finished before the loss"
    finished = sum(len(s.token_ids) for s in generation.samples if len(s.instance_ids) == 1)
    assert made == sum(lengths) - finished - generation.num_kept_tokens


async def test_what_cannot_be_continued_exactly_is_made_again_whole(survivor, doomed):
    sampling = Sampling(max_tokens=200, seed=7, ignore_eos=True, frequency_penalty=0.5)
    whole = await undisturbed(survivor, sampling)
    generations, _ = await lost_on_the_way([doomed.url, survivor.url], doomed.kill, sampling)
    assert_equal(generations, whole)
    assert sum(g.num_restarts > 0 for g in generations) == 2
    assert all(g.num_moves == 0 and len(s.instance_ids) == 1 for g in generations for s in g.samples)


async def test_a_repetition_penalty_counts_the_prompt_too_so_the_sample_goes_on(survivor, doomed):
    sampling = Sampling(max_tokens=200, seed=7, ignore_eos=True, repetition_penalty=1.3)
    whole = await undisturbed(survivor, sampling)
    generations, _ = await lost_on_the_way([doomed.url, survivor.url], doomed.kill, sampling)
    assert_equal(generations, whole)
    assert sum(g.num_moves > 0 for g in generations) == 2


async def test_a_request_without_a_seed_goes_on_under_the_one_that_the_lost_server_chose(survivor, doomed):
    async with await RolloutPool.connect([doomed.url, survivor.url]) as pool:
        sampling = Sampling(max_tokens=200, ignore_eos=True)
        work = asyncio.create_task(pool.generate([1], sampling, mode=RAW, timeout_s=30))
        await asyncio.sleep(0.3)
        doomed.kill()
        moved = await work
        again = await pool.generate(
            [1], Sampling(max_tokens=200, ignore_eos=True, seed=moved.effective.seed), mode=RAW, timeout_s=30
        )
    assert moved.num_moves == 1
    assert_equal([moved], [again])


async def test_the_only_server_restarted_on_its_port_goes_on_with_what_the_last_one_made():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    with ReferenceServer(*SLOW, listen=listen) as first:
        async with await RolloutPool.connect([first.url]) as pool:
            work = asyncio.gather(*groups(pool))
            await asyncio.sleep(0.4)
            first.kill()
            with ReferenceServer(*SLOW, listen=listen) as second:
                generations = await work
                assert_equal(generations, await undisturbed(second))
    assert all(g.num_moves >= 3 and g.num_kept_tokens > 0 for g in generations)


async def test_a_replica_that_leaves_hands_its_work_over(survivor, doomed):
    whole = await undisturbed(survivor)
    async with await RolloutPool.connect([doomed.url, survivor.url]) as pool:
        work = asyncio.gather(*groups(pool))
        await asyncio.sleep(0.3)
        await pool.remove(doomed.url, drain_s=0.1)
        assert [c.url for c in pool.clients] == [survivor.url]
        assert_equal(await work, whole)
        with pytest.raises(ValueError, match="the last replica"):
            await pool.remove(survivor.url)
        with pytest.raises(ValueError, match="is not in the pool"):
            await pool.remove(doomed.url)
        await pool.add(doomed.url)
        with pytest.raises(ValueError, match="in the pool already"):
            await pool.add(doomed.url)
        assert {g.instance_id for g in await asyncio.gather(*groups(pool, count=8))} == {
            c.info.instance_id for c in pool.clients
        }


async def test_a_stale_replica_gets_nothing_until_it_has_caught_up(survivor, doomed):
    async with await RolloutPool.connect([doomed.url, survivor.url]) as pool:
        pool.expect(1)
        assert len(pool.stale()) == 2
        with pytest.raises(DeadlineExceeded, match="STALE, it has version 0 of 1"):
            await pool.generate([1], Sampling(max_tokens=1), mode=RAW, timeout_s=0.3)
        pool.expect(0)
        assert len((await pool.generate([1], Sampling(max_tokens=1), mode=RAW, timeout_s=5)).samples) == 1


async def test_the_load_of_other_callers_counts(survivor, doomed):
    async with (
        await RolloutPool.connect([doomed.url]) as other,
        await RolloutPool.connect([doomed.url, survivor.url]) as pool,
    ):
        theirs = asyncio.gather(*groups(other, count=12))
        while pool.replicas[0].load < 12:
            await asyncio.sleep(0.02)
        ours = await asyncio.gather(*groups(pool, count=3))
        assert {g.instance_id for g in ours} == {pool.clients[1].info.instance_id}
        theirs.cancel()
        await asyncio.gather(theirs, return_exceptions=True)


async def test_without_any_replica_the_wait_ends_at_the_timeout_and_names_them(doomed):
    async with await RolloutPool.connect([doomed.url]) as pool:
        doomed.kill()
        with pytest.raises(ServerUnreachable, match=doomed.url):
            await pool.generate([1], Sampling(max_tokens=1), mode=RAW, timeout_s=1.0)
        with pytest.raises(ServerUnreachable, match=f"no rollout server answers.*{doomed.url}: away for"):
            await pool.generate([1], Sampling(max_tokens=1), mode=RAW, timeout_s=0.5)


async def test_a_caller_that_gives_up_ends_the_work_everywhere(survivor, doomed):
    async with await RolloutPool.connect([doomed.url, survivor.url]) as pool:
        work = asyncio.gather(*groups(pool))
        await asyncio.sleep(0.3)
        doomed.kill()
        await asyncio.sleep(0.1)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        while (status := await pool.clients[1].status()).running:
            await asyncio.sleep(0.05)
        assert status.waiting == 0 and all(r.num_samples == 0 for r in pool.replicas)


async def test_an_adapters_request_goes_where_the_adapter_is_whatever_the_base_version(survivor, doomed):
    layout, tensors = _adapter()
    publisher = WeightPublisher()
    async with await RolloutPool.connect([doomed.url, survivor.url]) as pool:
        target = PublishTarget(survivor.url, await pool.acquire_control("trainer"))
        lora = {"rank": 1, "alpha": 1.0, "target_modules": ("embed_tokens",)}
        await publisher.publish_adapter("red", layout, tensors, [target], target_version=3, timeout_s=20, **lora)
        await pool.refresh()
        for i in range(4):
            one = Sampling(max_tokens=2)
            made = await pool.generate([1], one, mode=RAW, timeout_s=10, affinity=str(i), policy_id="red")
            assert made.instance_id == pool.clients[1].info.instance_id
            assert set(made.samples[0].weight_versions) == {3}
    publisher.close()


async def test_a_replica_without_the_expected_adapter_is_stale_until_it_has_caught_up(survivor, doomed):
    layout, tensors = _adapter()
    publisher, lora = WeightPublisher(), {"rank": 1, "alpha": 1.0, "target_modules": ("embed_tokens",)}
    async with await RolloutPool.connect([doomed.url, survivor.url]) as pool:
        epoch = await pool.acquire_control("trainer")
        targets = [PublishTarget(r.url, epoch) for r in pool.replicas]
        info = pool.clients[0].info
        base = {t.name: np.zeros(t.shape, np.float32) for t in info.model.tensors}
        version = pool.highest_version() + 1
        await publisher.publish(
            info.model.tensors,
            [(name, memoryview(value)) for name, value in base.items()],
            targets,
            target_version=version,
            timeout_s=20,
        )
        await publisher.publish_adapter("blue", layout, tensors, targets[1:], target_version=5, timeout_s=20, **lora)
        pool.expect(version)
        pool.expect(5, "blue")
        await pool.refresh()
        assert [r.url for r in pool.stale()] == [doomed.url] and pool.highest_version("blue") == 5
        for i in range(3):
            made = await pool.generate([1], Sampling(max_tokens=2), mode=RAW, timeout_s=10, affinity=str(i))
            assert made.instance_id == pool.clients[1].info.instance_id
        report = await publisher.catch_up([targets[0]], timeout_s=20)
        assert report.committed == (doomed.url,)
        await pool.refresh()
        assert not pool.stale() and pool.replicas[0].versions == {"": version, "blue": 5}
        pool.expect(version + 1)
        assert len(pool.stale()) == 2
    publisher.close()


async def test_a_request_for_an_expected_adapter_waits_where_its_replica_was_replaced(survivor):
    layout, tensors = _adapter()
    publisher, lora = WeightPublisher(), {"rank": 1, "alpha": 1.0, "target_modules": ("embed_tokens",)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with ReferenceServer(listen=listen) as first:
        async with await RolloutPool.connect([first.url]) as pool:
            target = PublishTarget(first.url, await pool.acquire_control("trainer"))
            await publisher.publish_adapter("red", layout, tensors, [target], target_version=1, timeout_s=20, **lora)
            pool.expect(1, "red")
            first.kill()
            with ReferenceServer(listen=listen):
                one = Sampling(max_tokens=2)
                waiting = asyncio.create_task(pool.generate([1], one, mode=RAW, timeout_s=30, policy_id="red"))
                while pool.replicas[0].versions != {"": 0}:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.3)
                assert not waiting.done()
                target = PublishTarget(first.url, await pool.acquire_control("trainer"))
                await publisher.publish_adapter(
                    "red", layout, tensors, [target], target_version=1, timeout_s=20, **lora
                )
                assert set((await waiting).samples[0].weight_versions) == {1}
    publisher.close()


def _adapter():
    """(layout, tensors) of rank 1 on the embedding."""
    values = {"A": np.ones((1, 16), np.float32), "B": np.ones((64, 1), np.float32)}
    named = {f"base_model.model.model.embed_tokens.lora_{part}.weight": value for part, value in values.items()}
    layout = [TensorLayout(name, "f32", value.shape) for name, value in named.items()]
    return layout, [(name, memoryview(value)) for name, value in named.items()]
