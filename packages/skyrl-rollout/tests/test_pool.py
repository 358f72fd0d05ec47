"""Several replicas: one home for a group, the rest spread out, and no request lost with a replica."""

import asyncio

import pytest
from skyrl_rollout.errors import Fenced, ServerUnreachable
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling

RAW = LogprobMode.RAW
SHORT = Sampling(max_tokens=30, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def servers():
    with ReferenceServer("--token-delay-ms", "2") as a, ReferenceServer("--token-delay-ms", "2") as b:
        yield a, b


async def test_a_group_stays_on_one_replica_and_groups_spread_over_all(servers):
    async with await RolloutPool.connect([s.url for s in servers]) as pool:
        calls = [
            pool.generate([i], SHORT, mode=RAW, timeout_s=20, affinity=f"group {i}") for i in range(8) for _ in range(3)
        ]
        instances = [g.instance_id for g in await asyncio.gather(*calls)]
        again = await pool.generate([3], SHORT, mode=RAW, timeout_s=20, affinity="group 3")
    homes = [set(instances[3 * i : 3 * i + 3]) for i in range(8)]
    assert all(len(home) == 1 for home in homes)
    assert sorted(map(len, (instances, set(instances)))) == [2, 24]
    assert {again.instance_id} == homes[3]
    assert {instances.count(i) for i in set(instances)} == {12}


async def test_one_epoch_holds_on_every_replica(servers):
    async with await RolloutPool.connect([s.url for s in servers]) as pool:
        await pool.clients[0].acquire_control("someone before")
        await pool.clients[0].acquire_control("someone before")
        epoch = await pool.acquire_control("trainer")
        for client in pool.clients:
            await client.resume(epoch, await client.pause(epoch, "keep"))
            assert (await client.refresh()).highest_trainer_epoch == epoch
        newer = await pool.acquire_control("trainer again")
        assert newer > epoch
        with pytest.raises(Fenced):
            await pool.clients[1].pause(epoch, "keep")
        assert pool.highest_version() == 0


async def test_a_restarted_server_that_heard_the_epoch_in_a_call_is_claimed_by_its_owner_only(servers):
    with ReferenceServer() as restarted:
        async with await RolloutPool.connect([servers[0].url, restarted.url]) as pool:
            epoch = await pool.clients[0].acquire_control("trainer")
            await pool.clients[1].pause(epoch, "keep")  # it came before the pool noticed another process
            assert await pool.extend_control(pool.replicas[1], "trainer", epoch) == epoch
            with pytest.raises(Fenced, match=r"owned by epoch \d+ \(trainer\)"):
                await pool.clients[1].acquire_control("another", claim_epoch=epoch)


async def test_a_pool_with_a_dead_endpoint_names_it_and_connects_to_none(servers):
    with pytest.raises(ServerUnreachable, match="grpc://127.0.0.1:1:"):
        await RolloutPool.connect([servers[0].url, "grpc://127.0.0.1:1"], timeout_s=0.5)
    with pytest.raises(ValueError, match="each only once"):
        await RolloutPool.connect([servers[0].url] * 2)


async def test_the_requests_of_a_replica_that_dies_finish_on_another(servers, monkeypatch):
    monkeypatch.setattr("skyrl_rollout.replicas.FAILOVER_S", 0.5)
    with ReferenceServer("--token-delay-ms", "5") as doomed:
        async with await RolloutPool.connect([doomed.url, servers[0].url]) as pool:
            sampling = Sampling(max_tokens=200, seed=1, ignore_eos=True)
            calls = [
                asyncio.create_task(pool.generate([i], sampling, mode=RAW, timeout_s=60, affinity=str(i)))
                for i in range(6)
            ]
            await asyncio.sleep(0.3)
            doomed.kill()
            generations = await asyncio.gather(*calls)
            survivor = pool.clients[1].info.instance_id
    assert {g.instance_id for g in generations} == {survivor}
    assert all(len(g.samples[0].token_ids) == 200 for g in generations)
