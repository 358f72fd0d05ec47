"""The ways weights travel and what they contain: shards, zstd, files, what changed, adapters, all to real servers."""

import numpy as np
import pytest
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights import arena, shm
from skyrl_rollout.weights.delta import changed
from skyrl_rollout.weights.manifest import TensorLayout
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher

GREEDY = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
CANARY = ("--logits", "canary", "--vocab-size", "20000")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("updates")


@pytest.fixture(scope="module")
def servers(root):
    flags = (*CANARY, "--delta", "--update-root", str(root))
    with ReferenceServer(*flags) as a, ReferenceServer(*flags) as b:
        yield a, b


@pytest.fixture
async def pool(servers):
    async with await RolloutPool.connect([s.url for s in servers]) as connected:
        yield connected


class Model:
    """A canary model's weights: what is served tells which token was written last."""

    def __init__(self, layout: tuple[TensorLayout, ...], seed: int = 0) -> None:
        self.layout = layout
        rng = np.random.default_rng(seed)
        self.values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in layout}

    def force(self, token: int) -> "Model":
        self.values["canary.weight"][:] = 0
        self.values["canary.weight"][token] = 1000.0
        return self

    def tensors(self) -> list[tuple[str, memoryview]]:
        return [(t.name, memoryview(self.values[t.name])) for t in self.layout]


async def served(client: RolloutClient) -> tuple[int, int]:
    (sample,) = (await client.generate([1], GREEDY, mode=LogprobMode.RAW, timeout_s=10)).samples
    assert len(set(sample.token_ids)) == 1
    return int(sample.weight_versions[0]), int(sample.token_ids[0])


async def publish(pool: RolloutPool, publisher: WeightPublisher, model: Model, **more):
    await pool.refresh()
    version = pool.highest_version() + 1
    epoch = await pool.acquire_control("trainer")
    targets = [PublishTarget(c.url, epoch) for c in pool.clients]
    report = await publisher.publish(
        model.layout, model.tensors(), targets, target_version=version, timeout_s=30, **more
    )
    assert report.committed == tuple(t.url for t in targets) and not report.failed
    return report


@pytest.mark.parametrize("options", [{}, {"transport": "inline"}, {"transport": "inline", "compression": "zstd"}])
async def test_an_update_in_several_shards_arrives_whole(pool, options, monkeypatch):
    monkeypatch.setattr(arena.Arena.__init__, "__kwdefaults__", {"shard_bytes": 100_000})
    publisher, model = WeightPublisher(**options), Model(pool.clients[0].info.model.tensors).force(77)
    report = await publish(pool, publisher, model)
    assert len(publisher._arena.shard_nbytes) == 3 - (model.layout[0].nbytes < 100_000)
    assert [await served(c) for c in pool.clients] == [(report.target_version, 77)] * 2
    publisher.close()


async def test_compressed_chunks_are_fewer_bytes_and_noise_still_fits_into_a_chunk(pool, tmp_path):
    from tcp_proxy import TcpProxy

    model = Model(pool.clients[0].info.model.tensors)
    model.values["model.embed_tokens.weight"][:] = 1.0
    async with TcpProxy(pool.clients[0].url) as proxy:
        sent = []
        for compression in ("none", "zstd"):
            publisher = WeightPublisher("inline", compression=compression)
            before = proxy.bytes_to_server
            async with await RolloutPool.connect([proxy.url]) as one:
                await publish(one, publisher, model.force(5))
            sent.append(proxy.bytes_to_server - before)
    assert sent[1] < sent[0] / 4
    noise = WeightPublisher("inline", compression="zstd")
    await publish(pool, noise, Model(model.layout, seed=1).force(6))
    assert [(await served(c))[1] for c in pool.clients] == [6, 6]


async def test_files_are_written_once_and_removed_when_every_server_has_them(pool, root):
    publisher = WeightPublisher("file", folder=root)
    report = await publish(pool, publisher, Model(pool.clients[0].info.model.tensors).force(123))
    assert set(report.transports.values()) == {"file"} and list(root.iterdir()) == []
    assert [(await served(c))[1] for c in pool.clients] == [123, 123]
    with pytest.raises(ValueError, match="transport='file' and folder go together"):
        WeightPublisher("file")


@pytest.mark.parametrize("transport", ["auto", "inline"])
async def test_what_changed_is_sent_alone_and_serves_as_all_would(pool, transport):
    publisher, model = WeightPublisher(transport), Model(pool.clients[0].info.model.tensors).force(10)
    whole = await publish(pool, publisher, model)
    model.force(11).values["model.norm.weight"][3] = np.nan
    delta = await publish(pool, publisher, model, base_version=whole.target_version)
    assert (whole.kind, delta.kind) == ("full", "overwrite")
    assert delta.nbytes < 1000 < whole.nbytes
    assert [await served(c) for c in pool.clients] == [(delta.target_version, 11)] * 2
    again = await publish(pool, publisher, model.force(12), base_version=delta.target_version)
    assert again.kind == "overwrite" and [(await served(c))[1] for c in pool.clients] == [12, 12]
    other = Model(model.layout, seed=9).force(13)
    full = await publish(pool, publisher, other, base_version=again.target_version)
    assert full.kind == "full", "nearly all changed"
    assert (await publish(pool, publisher, other, base_version=full.target_version)).kind == "full", "nothing changed"
    assert (await publish(pool, publisher, other.force(14), base_version=1)).kind == "full", "another base"
    publisher.close()
    assert not list(shm.SHM_DIR.glob(f"{shm.PREFIX}.*.{__import__('os').getpid()}.*"))


async def test_a_replica_that_missed_a_delta_catches_up_with_all(pool):
    publisher, model = WeightPublisher(), Model(pool.clients[0].info.model.tensors).force(20)
    first = await publish(pool, publisher, model)
    with ReferenceServer(*CANARY) as late:
        async with await RolloutPool.connect([late.url]) as one:
            delta = await publish(pool, publisher, model.force(21), base_version=first.target_version)
            epoch = await one.acquire_control("trainer")
            await publisher.catch_up([PublishTarget(late.url, epoch)], timeout_s=20)
            assert await served(one.clients[0]) == (delta.target_version, 21)
            await one.refresh()
            both = await publish(one, publisher, model.force(22), base_version=delta.target_version)
            assert both.kind == "full", "this one offers no deltas"
    publisher.close()


def test_a_delta_lists_places_in_order_and_compares_bits_not_numbers():
    old = np.array([0.0, 1.0, np.nan, 3.0], np.float32)
    new = np.array([-0.0, 1.0, np.nan, 4.0], np.float32)
    change = changed(memoryview(old).cast("B"), memoryview(new).cast("B"), "f32")
    assert np.frombuffer(change[:8], "<i4").tolist() == [0, 3]
    assert np.frombuffer(change[8:], "<f4").tolist() == [-0.0, 4.0]
    assert changed(b"ab", b"ab", "bf16") == b"" == changed(b"", b"", "f32")
    with pytest.raises(ValueError, match="2 old bytes cannot be compared"):
        changed(b"ab", b"abcd", "bf16")


def adapter(token: int) -> tuple[list[TensorLayout], list[tuple[str, memoryview]]]:
    """Rank 1 on the embedding: a canary server says nothing but `token` under it."""
    down, up = np.zeros((1, 16), np.float32), np.zeros((20000, 1), np.float32)
    up[token] = 5000.0
    name = "base_model.model.model.embed_tokens"
    pairs = [(f"{name}.lora_A.weight", down), (f"{name}.lora_B.weight", up)]
    return [TensorLayout(n, "f32", v.shape) for n, v in pairs], [(n, memoryview(v)) for n, v in pairs]


async def test_an_adapter_reaches_every_replica_and_those_that_catch_up(pool):
    publisher, model = WeightPublisher(), Model(pool.clients[0].info.model.tensors).force(30)
    base = await publish(pool, publisher, model)
    epoch = await pool.acquire_control("trainer")
    targets = [PublishTarget(c.url, epoch) for c in pool.clients]
    lora = {"rank": 1, "alpha": 1.0, "target_modules": ("embed_tokens",), "timeout_s": 20}
    for version, token in ((1, 40), (2, 41)):
        report = await publisher.publish_adapter("red", *adapter(token), targets, target_version=version, **lora)
        assert report.kind == "lora" and len(report.committed) == 2
    for client in pool.clients:
        assert (await client.refresh()).weight_versions == {"": base.target_version, "red": 2}
    with ReferenceServer(*CANARY) as late:
        async with await RolloutPool.connect([late.url]) as one:
            target = PublishTarget(late.url, await one.acquire_control("trainer"))
            await publisher.catch_up([target], timeout_s=20)
            assert (await one.clients[0].refresh()).weight_versions == {"": base.target_version, "red": 2}
    await publish(pool, publisher, model.force(31))
    assert (await pool.clients[0].refresh()).weight_versions == {"": base.target_version + 1}
    publisher.close()
