"""Publishing weights to real servers: which bytes arrive, which version serves, and that failure changes nothing."""

import asyncio
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from skyrl_rollout.calls import Deadline
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import CorruptBytes, DeadlineExceeded, Fenced, ModelMismatch, RolloutError, VersionConflict
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights import shm
from skyrl_rollout.weights.arena import Arena
from skyrl_rollout.weights.manifest import Manifest, TensorLayout
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher
from skyrl_rollout.weights.update import Cargo, ServerUpdate
from tcp_proxy import TcpProxy

GREEDY = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def servers():
    flags = ("--logits", "canary", "--vocab-size", "50000")  # 3.4 MB of weights: several inline chunks
    with ReferenceServer(*flags) as a, ReferenceServer(*flags) as b:
        yield a, b


@pytest.fixture
async def pool(servers):
    async with await RolloutPool.connect([s.url for s in servers]) as connected:
        yield connected


@pytest.fixture
def publisher():
    made = WeightPublisher()
    yield made
    made.close()


def weights(layout: tuple[TensorLayout, ...], token: int) -> list[tuple[str, memoryview]]:
    """Weights under which a canary server makes nothing but `token`."""
    out = []
    for t in layout:
        values = np.random.default_rng(token).standard_normal(t.shape, np.float32)
        if t.name == "canary.weight":
            values[token] = 1000.0
        out.append((t.name, memoryview(values)))
    return out


async def served(client: RolloutClient) -> tuple[int, int]:
    """(version, token) that the server really serves."""
    generation = await client.generate([1], GREEDY, mode=LogprobMode.RAW, timeout_s=10)
    (sample,) = generation.samples
    assert len(set(sample.token_ids)) == 1 and len(set(sample.weight_versions)) == 1
    assert (await client.refresh()).weight_version == sample.weight_versions[0]
    return int(sample.weight_versions[0]), int(sample.token_ids[0])


async def above(pool: RolloutPool) -> int:
    """A version that no replica has committed."""
    await pool.refresh()
    return pool.highest_version() + 1


async def targets_of(pool: RolloutPool, urls: list[str] | None = None) -> list[PublishTarget]:
    epoch = await pool.acquire_control("trainer")
    return [PublishTarget(url, epoch) for url in urls or [c.url for c in pool.clients]]


def segments() -> list[str]:
    return [p.name for p in shm.SHM_DIR.glob(f"{shm.PREFIX}.*.{os.getpid()}.*")]


@pytest.mark.parametrize("transport", ["auto", "inline"])
async def test_every_replica_serves_what_was_published_and_the_segment_is_used_again(pool, transport):
    publisher, layout = WeightPublisher(transport), pool.clients[0].info.model.tensors
    targets = await targets_of(pool)
    names = set()
    first = await above(pool)
    for version, token in ((first, 111), (first + 1, 222), (first + 7, 333)):
        report = await publisher.publish(layout, weights(layout, token), targets, target_version=version, timeout_s=20)
        assert [await served(c) for c in pool.clients] == [(version, token)] * 2
        assert set(report.transports.values()) == {"shm" if transport == "auto" else "inline"}
        assert list(report.seconds) == ["look", "copy", "begin", "transfer", "seal", "commit"]
        assert report.nbytes >= sum(t.nbytes for t in layout) and report.total_s > 0
        names |= set(segments())
    assert len(names) == (1 if transport == "auto" else 0)
    publisher.close()
    assert segments() == []


async def test_a_server_of_another_model_is_refused_with_the_tensors_named_before_a_byte_is_copied(pool, publisher):
    layout = list(pool.clients[0].info.model.tensors)
    layout[1] = TensorLayout(layout[1].name, "bf16", (3, 16))
    layout[2] = TensorLayout("lm_head.weight", "f32", (16,))

    def never():
        raise AssertionError("a tensor was asked for")
        yield

    with pytest.raises(ModelMismatch) as refused:
        await publisher.publish(layout, never(), await targets_of(pool), target_version=99, timeout_s=10)
    assert "3 tensors differ" in refused.value.message and pool.clients[0].url in refused.value.message
    assert "model.embed_tokens.weight: shape [3, 16] from the trainer, [50000, 16] at the server" in str(refused.value)
    names = {name for name, _ in refused.value.violations}
    assert names == {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert segments() == []


async def test_a_byte_flipped_before_the_seal_is_found_and_the_old_version_serves(pool, publisher):
    layout, targets, first = pool.clients[0].info.model.tensors, await targets_of(pool), await above(pool)
    await publisher.publish(layout, weights(layout, 5), targets, target_version=first, timeout_s=20)
    arena = Arena(layout, shared=True)
    for name, data in weights(layout, 6):
        arena.write(name, data)
    update = ServerUpdate(targets[0], Deadline(10, "a test"))
    update.transport, cargo = "shm", Cargo(Manifest(first + 1, arena.specs()), arena)
    await update.look()
    await update.begin(cargo)
    await update.transfer(cargo)
    arena.buffers[0][100] ^= 1
    with pytest.raises(CorruptBytes, match=r"canary\.weight"):
        await update.seal(cargo)
    assert await served(pool.clients[0]) == (first, 5)
    await update.abort()
    await update.close()
    arena.close()
    await publisher.publish(layout, weights(layout, 7), targets, target_version=first + 1, timeout_s=20)
    assert [await served(c) for c in pool.clients] == [(first + 1, 7)] * 2


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("skyrl_rollout.weights.update.LAST_WORD_S", 0.3)
    monkeypatch.setattr("skyrl_rollout.weights.publisher.AWAY_S", 0.3)


def leaves_at(proxy: TcpProxy, call: str) -> None:
    def leave() -> None:
        proxy.refusing = True
        proxy.cut()

    proxy.when_sent(call, leave)


@pytest.mark.usefixtures("impatient")
async def test_with_abort_one_replica_that_fails_its_seal_keeps_every_replica_on_the_old_version(pool):
    layout, first = pool.clients[0].info.model.tensors, await above(pool)
    publisher = WeightPublisher(on_failure="abort")
    async with TcpProxy(pool.clients[1].url) as proxy:
        targets = await targets_of(pool, [pool.clients[0].url, proxy.url])
        await publisher.publish(layout, weights(layout, 5), targets, target_version=first, timeout_s=20)
        used = segments()
        leaves_at(proxy, "SealUpdate")
        with pytest.raises(RolloutError, match=f"{proxy.url}.*SealUpdate"):
            await publisher.publish(layout, weights(layout, 6), targets, target_version=first + 1, timeout_s=1.5)
        assert [await served(c) for c in pool.clients] == [(first, 5)] * 2
        assert (await pool.clients[0].status()).open_update_id == "" and publisher.published_version is None
        with pytest.raises(ValueError, match="no published weights to catch up with"):
            await publisher.catch_up(targets, timeout_s=5)
        proxy.refusing = False
        await publisher.publish(layout, weights(layout, 7), targets, target_version=first + 1, timeout_s=20)
        assert not set(used) & set(segments()), "the server behind the proxy may have read it: it is not written again"
    assert [await served(c) for c in pool.clients] == [(first + 1, 7)] * 2
    publisher.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("call", ["PullUpdate", "SealUpdate", "CommitUpdate"])
async def test_a_replica_that_fails_is_left_out_told_and_catches_up_from_the_bytes_that_are_kept(pool, publisher, call):
    layout, first = pool.clients[0].info.model.tensors, await above(pool)
    async with TcpProxy(pool.clients[1].url) as proxy:
        targets = await targets_of(pool, [pool.clients[0].url, proxy.url])
        await publisher.publish(layout, weights(layout, 5), targets, target_version=first, timeout_s=20)
        leaves_at(proxy, call)
        report = await publisher.publish(layout, weights(layout, 6), targets, target_version=first + 1, timeout_s=20)
        assert report.committed == (pool.clients[0].url,) and list(report.failed) == [proxy.url]
        assert "no rollout server answers" in report.failed[proxy.url] and publisher.published_version == first + 1
        assert await served(pool.clients[0]) == (first + 1, 6)
        with pytest.raises(RolloutError, match="no rollout server answers"):
            await publisher.catch_up(targets[1:], timeout_s=1)
        proxy.refusing = False
        caught_up = await publisher.catch_up(targets[1:], timeout_s=20)
        assert caught_up.committed == (proxy.url,) and caught_up.target_version == first + 1
        again = await publisher.catch_up(targets, timeout_s=20)  # nothing to do there: no version moves
        assert again.committed == tuple(t.url for t in targets)
    assert [await served(c) for c in pool.clients] == [(first + 1, 6)] * 2


async def test_a_lost_commit_reply_is_asked_for_again_and_moves_the_version_once(pool, publisher):
    layout, version = pool.clients[0].info.model.tensors, await above(pool)
    async with TcpProxy(pool.clients[0].url) as proxy:
        targets = await targets_of(pool, [proxy.url])

        def lose_the_reply() -> None:
            proxy.deaf = True
            asyncio.get_running_loop().call_later(0.3, come_back)

        def come_back() -> None:
            proxy.deaf = False
            proxy.cut()

        proxy.when_sent("CommitUpdate", lose_the_reply)
        report = await publisher.publish(layout, weights(layout, 8), targets, target_version=version, timeout_s=20)
        assert report.seconds["commit"] > 0.3
    assert await served(pool.clients[0]) == (version, 8)


async def test_an_inline_upload_that_is_cut_goes_on_where_it_stopped(pool):
    publisher, layout, version = WeightPublisher("inline"), pool.clients[0].info.model.tensors, await above(pool)
    async with TcpProxy(pool.clients[0].url) as proxy:
        targets = await targets_of(pool, [proxy.url])
        task = asyncio.create_task(
            publisher.publish(layout, weights(layout, 9), targets, target_version=version, timeout_s=20)
        )
        while proxy.bytes_to_server < 2 << 20:
            await asyncio.sleep(0)
        proxy.cut()
        report = await task
        sent = proxy.bytes_to_server
    assert await served(pool.clients[0]) == (version, 9)
    assert report.nbytes < sent < 2 * report.nbytes


async def test_wrong_tensors_a_version_that_does_not_grow_and_an_old_epoch_change_nothing(pool, publisher):
    layout, targets, first = pool.clients[0].info.model.tensors, await targets_of(pool), await above(pool)
    await publisher.publish(layout, weights(layout, 5), targets, target_version=first, timeout_s=20)
    with pytest.raises(ValueError, match="1 of 3 tensors never came: model.norm.weight"):
        await publisher.publish(layout, weights(layout, 6)[:2], targets, target_version=first + 1, timeout_s=20)
    with pytest.raises(VersionConflict, match=f"serves version {first}, and versions only grow"):
        await publisher.publish(layout, weights(layout, 6), targets, target_version=first, timeout_s=20)
    await pool.acquire_control("another trainer")
    with pytest.raises(Fenced):
        await publisher.publish(layout, weights(layout, 6), targets, target_version=first + 1, timeout_s=20)
    assert [await served(c) for c in pool.clients] == [(first, 5)] * 2


@pytest.mark.usefixtures("impatient")
async def test_a_dead_target_is_named_and_keeps_nobody_waiting(pool, publisher):
    layout, targets, first = pool.clients[0].info.model.tensors, await targets_of(pool), await above(pool)
    nobody = PublishTarget("grpc://127.0.0.1:1", 9)
    report = await publisher.publish(layout, weights(layout, 6), [*targets, nobody], target_version=first, timeout_s=60)
    assert list(report.failed) == [nobody.url] and "tried GetServerInfo" in report.failed[nobody.url]
    assert [await served(c) for c in pool.clients] == [(first, 6)] * 2
    with pytest.raises(RolloutError, match="no rollout server answers at grpc://127.0.0.1:1: tried GetServerInfo"):
        await publisher.publish(layout, weights(layout, 6), [nobody], target_version=1, timeout_s=0.5)


async def test_a_slow_source_is_stopped_at_the_deadline_and_says_where(pool, publisher):
    layout, targets = pool.clients[0].info.model.tensors, await targets_of(pool)

    def slow():
        for pair in weights(layout, 6):
            yield pair
            time.sleep(0.3)

    with pytest.raises(DeadlineExceeded, match="publishing version 99 did not end within 0.2 s: .* the copy of"):
        await publisher.publish(layout, slow(), targets, target_version=99, timeout_s=0.2)


async def test_too_little_shared_memory_is_said_and_the_bytes_go_inline(pool, monkeypatch, caplog):
    monkeypatch.setattr(shm, "free_nbytes", lambda: 1 << 20)
    layout, targets, first = pool.clients[0].info.model.tensors, await targets_of(pool), await above(pool)
    report = await WeightPublisher().publish(layout, weights(layout, 4), targets, target_version=first, timeout_s=20)
    assert set(report.transports.values()) == {"inline"} and "/dev/shm has 1.0 MB left" in caplog.text
    with pytest.raises(MemoryError, match="the weights need 3.4 MB of shared memory"):
        await WeightPublisher("shm").publish(
            layout, weights(layout, 4), targets, target_version=first + 1, timeout_s=20
        )
    assert await served(pool.clients[0]) == (first, 4)


TRAINER = """
import asyncio, sys, time
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher

async def main(url):
    client = await RolloutClient.connect(url)
    layout = client.info.model.tensors
    epoch = await client.acquire_control("doomed")
    def tensors(last):
        for t in layout:
            yield t.name, memoryview(bytes(t.nbytes))
        if last:
            print("copied", flush=True)
            time.sleep(60)
    publisher = WeightPublisher()
    first = int(sys.argv[2])
    for version in (first, first + 1):
        await publisher.publish(layout, tensors(version > first), [PublishTarget(url, epoch)],
                                target_version=version, timeout_s=90)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_trainer_killed_while_it_publishes_leaves_a_serving_server_and_no_shared_memory(pool):
    first = await above(pool)
    command = (sys.executable, "-c", TRAINER, pool.clients[0].url, str(first))
    trainer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert (await trainer.stdout.readline()).strip() == b"copied"
    trainer.kill()
    await trainer.wait()
    left = [p.name for p in shm.SHM_DIR.glob(f"{shm.PREFIX}.*.{trainer.pid}.*")]
    assert len(left) == 1 and (await pool.clients[0].refresh()).weight_version == first
    publisher, layout = WeightPublisher(), pool.clients[0].info.model.tensors
    assert not (shm.SHM_DIR / left[0]).exists()
    await publisher.publish(layout, weights(layout, 3), await targets_of(pool), target_version=first + 1, timeout_s=20)
    assert [await served(c) for c in pool.clients] == [(first + 1, 3)] * 2
    publisher.close()


async def test_a_publish_that_is_cancelled_leaves_no_open_update(pool, publisher):
    layout, targets, first = pool.clients[0].info.model.tensors, await targets_of(pool), await above(pool)
    async with TcpProxy(pool.clients[1].url) as proxy:
        both = [targets[0], PublishTarget(proxy.url, targets[0].trainer_epoch)]
        proxy.when_sent("SealUpdate", lambda: setattr(proxy, "deaf", True))
        task = asyncio.create_task(
            publisher.publish(layout, weights(layout, 6), both, target_version=first, timeout_s=60)
        )
        while not proxy.deaf:
            await asyncio.sleep(0.01)
        task.cancel()
        proxy.deaf = False
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [(await c.status()).open_update_id for c in pool.clients] == ["", ""]
    assert await above(pool) == first


@pytest.mark.parametrize("retain_kv", [False, True])
async def test_a_sample_that_runs_over_a_commit_keeps_its_kv_or_makes_it_anew_as_the_target_says(
    pool, publisher, retain_kv
):
    client = pool.clients[0]
    epoch = await client.acquire_control("kv")
    old = (await client.refresh()).weight_versions[""]
    began = asyncio.Event()
    running = asyncio.create_task(
        client.generate(
            [1],
            Sampling(max_tokens=60, temperature=0.0, ignore_eos=True),
            mode=LogprobMode.RAW,
            timeout_s=20,
            tokens_per_event=1,
            backend_options={"token_delay_s": 0.02},
            on_progress=lambda n: began.set(),
        )
    )
    await asyncio.wait_for(began.wait(), 10)
    layout = tuple(client.info.model.tensors)
    target = PublishTarget(client.url, epoch, retain_kv=retain_kv)
    await publisher.publish(layout, weights(layout, 7), [target], target_version=old + 1, timeout_s=20)
    (sample,) = (await running).samples
    assert [span.weight_version for span in sample.spans] == [old, old + 1]
    assert sample.spans[1].oldest_kv_version == (old if retain_kv else old + 1)
