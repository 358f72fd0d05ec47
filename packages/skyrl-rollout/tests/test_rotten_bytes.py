"""Bytes that arrive twice, in another order, late or changed: noticed, sent again, and never served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest
from raw_calls import RawCalls, ask, refused
from raw_updates import begin, chunk, commit, draft, flipped, forcing, seal, send, version
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import CorruptBytes
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import Generation, LogprobMode, Sampling
from skyrl_rollout.weights.manifest import TensorLayout
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget, WeightPublisher
from tcp_proxy import TcpProxy

GOOD, BAD = 21, 33  # what the server says under the old weights, and under those that are damaged on their way
MARK = bytes(range(200, 232)) * 4  # stands once in the weights


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updates")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--update-root", str(root)) as process:
        yield process


async def test_chunks_that_come_twice_or_out_of_order_leave_one_dense_upload(calls: RawCalls, epoch: int) -> None:
    now = await version(calls)
    d = draft(now + 1, forcing(5) | {"model.embed_tokens.weight": np.random.default_rng(0).random((64, 16), "f4")})
    ends = [0, 1000, 2000, 3000, len(d.shard)]
    first, second, third, last = pairwise(ends)
    await begin(calls, epoch, d)
    assert (await send(calls, chunk(d, *first))).durable_offset == 1000
    ahead = await refused(send(calls, chunk(d, *third), chunk(d, *second)))
    assert (ahead.code, ahead.details) == (grpc.StatusCode.OUT_OF_RANGE, {"durable_offset": "1000", "shard": "0"})
    assert (await send(calls, chunk(d, *first), chunk(d, *second), chunk(d, *first))).durable_offset == 2000
    other = flipped(replace(d, shard=d.shard[:2000]))
    assert (await send(calls, chunk(other, *second))).durable_offset == 2000, "the one that came first counts"
    await send(calls, chunk(d, *third), chunk(d, *third), chunk(d, *first), chunk(d, *last))
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    assert (await calls.generate(ask(3))).tokens() == [5] * 3


class Trainer:
    """Publishes over a proxy that a test lets damage what it carries."""

    def __init__(self, client: RolloutClient, publisher: WeightPublisher, epoch: int) -> None:
        self.client, self.publisher, self._epoch = client, publisher, epoch

    async def publish(self, token: int) -> PublishReport:
        layout, info = self.client.info.model.tensors, await self.client.refresh()
        return await self.publisher.publish(
            layout, marked(layout, token), [PublishTarget(self.client.url, self._epoch)],
            target_version=info.weight_version + 1, timeout_s=20,
        )  # fmt: skip

    async def served(self) -> tuple[int, list[int]]:
        (sample,) = (
            await self.client.generate([1], Sampling(max_tokens=3, ignore_eos=True), mode=LogprobMode.RAW, timeout_s=10)
        ).samples
        (of,) = set(sample.weight_versions.tolist())
        return of, sample.token_ids.tolist()


def marked(layout: tuple[TensorLayout, ...], token: int) -> list[tuple[str, memoryview]]:
    canary, out = forcing(token), []
    for t in layout:
        data = bytearray(np.ascontiguousarray(canary.get(t.name, np.zeros(t.shape, "<f4"))).tobytes())
        if t.name == "model.embed_tokens.weight":
            data[1024 : 1024 + len(MARK)] = MARK
        out.append((t.name, memoryview(bytes(data))))
    return out


async def test_a_bit_flipped_on_the_wire_is_noticed_and_the_chunk_sent_again(server: ReferenceServer, caplog) -> None:
    publisher = WeightPublisher("inline")
    async with TcpProxy(server.url) as proxy, await RolloutClient.connect(proxy.url) as client:
        trainer = Trainer(client, publisher, await client.acquire_control("trainer"))
        proxy.flip(MARK, times=2)
        report = await trainer.publish(BAD)
        assert proxy.num_flipped == 2 and "does not have its crc32c" in caplog.text
        assert await trainer.served() == (report.target_version, [BAD] * 3)
        await trainer.publish(GOOD)
        before, proxy.num_flipped = await trainer.served(), 0
        proxy.flip(MARK, times=1000)
        with pytest.raises(CorruptBytes, match="crc32c"):
            await trainer.publish(BAD)
        assert proxy.num_flipped > 2
        assert await trainer.served() == before and (await client.status()).open_update_id == ""


async def test_a_bit_that_rots_in_a_file_is_noticed_at_the_seal(server: ReferenceServer, root: Path) -> None:
    publisher = WeightPublisher("file", folder=root)
    async with TcpProxy(server.url) as proxy, await RolloutClient.connect(proxy.url) as client:
        trainer = Trainer(client, publisher, await client.acquire_control("trainer"))
        await trainer.publish(GOOD)
        before, rotten = await trainer.served(), []

        def rot() -> None:
            (file,) = root.glob("*/shard-0.bin")
            data = bytearray(file.read_bytes())
            data[data.index(MARK)] ^= 1
            file.write_bytes(data)
            rotten.append(file)

        proxy.when_sent("PullUpdate", rot)
        with pytest.raises(CorruptBytes, match=r"model\.embed_tokens\.weight"):
            await trainer.publish(BAD)
        assert rotten and await trainer.served() == before
        assert (await client.status()).open_update_id == "" and os.listdir(root) == []
        report = await trainer.publish(BAD)
        assert await trainer.served() == (report.target_version, [BAD] * 3)


PARTS: dict[str, Callable[[Generation], np.ndarray]] = {
    "token_ids": lambda made: made.samples[0].token_ids,
    "logprobs": lambda made: made.samples[0].logprobs,
    "top_ids": lambda made: made.samples[0].top.token_ids,
    "top_logprobs": lambda made: made.samples[0].top.logprobs,
    "extra": lambda made: made.samples[0].extras["routed_experts"],
    "prompt_logprobs": lambda made: made.prompt_logprobs,
}


@pytest.mark.parametrize("part", PARTS)
async def test_what_changes_on_its_way_to_the_caller_is_an_error_and_never_a_sample(
    server: ReferenceServer, part: str
) -> None:
    async with TcpProxy(server.url) as proxy, await RolloutClient.connect(proxy.url) as client:
        asked = Sampling(max_tokens=64, seed=3, ignore_eos=True)
        beside = {"top_logprobs": 3, "prompt_last_n": 40, "extras": ("routed_experts",)}

        async def generate() -> Generation:
            return await client.generate(range(50), asked, mode=LogprobMode.RAW, timeout_s=10, **beside)

        sent = PARTS[part](await generate()).tobytes()
        proxy.flip(sent[:128])
        with pytest.raises(CorruptBytes, match="what arrived is not what was sent .crc32c.: ask again"):
            await generate()
        assert proxy.num_flipped == 1
        assert PARTS[part](await generate()).tobytes() == sent


async def test_scores_that_change_on_their_way_are_an_error(server: ReferenceServer) -> None:
    async with TcpProxy(server.url) as proxy, await RolloutClient.connect(proxy.url) as client:
        scores = await client.score(range(50), 10, mode=LogprobMode.RAW, timeout_s=10)
        proxy.flip(scores.logprobs.tobytes()[:128])
        with pytest.raises(CorruptBytes, match="scores from token 10: what arrived is not what was sent"):
            await client.score(range(50), 10, mode=LogprobMode.RAW, timeout_s=10)
        assert proxy.num_flipped == 1
