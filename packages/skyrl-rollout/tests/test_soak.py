"""Is anything lost, repeated, wrongly labelled or left behind while replicas are killed under generation and publishes?

    python -m pytest packages/skyrl-rollout/tests/test_soak.py -m long -s

runs for 30 minutes and shows how far it is; CI runs a tenth. SOAK_SEED=n repeats the choices of a run, not its timing.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import versioned_canary as canary
from held import Held, Life
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import Generation, LogprobMode, Sampling
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher
from skyrl_rollout.weights.shm import Segment
from soak import Soak

LONG_S = 1800.0


async def soak(folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.getrandbits(32))
    # glibc would keep freed megabytes, in each thread's arena, and hide what is really held
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 << 10))
    run = Soak(seconds=seconds, seed=seed, folder=folder, say=lambda line: print(line, flush=True))
    print(f"\nSOAK_SEED={seed}, {seconds:g} s", flush=True)
    try:
        print(f"seed {seed}: {await run.run()}", flush=True)
    except BaseException:
        print(f"SOAK_SEED={seed} failed: {run.done}", *run.events, sep="\n", flush=True)
        raise


@pytest.mark.ci
@pytest.mark.timeout(600)
async def test_a_tenth_of_the_soak_loses_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await soak(tmp_path, LONG_S / 10, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_S)
async def test_the_whole_soak_loses_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await soak(tmp_path, LONG_S, monkeypatch)


# What the soak would see

PROMPT = [5, 6, 7]
SAMPLING = Sampling(max_tokens=60, seed=11)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceServer]:
    model = canary.write_model(tmp_path_factory.mktemp("model"))
    with ReferenceServer("--model", str(model), "--logits", "canary") as running:
        yield running


@pytest.fixture
async def made(server: ReferenceServer) -> AsyncIterator[Generation]:
    """Four samples under version 3."""
    publisher = WeightPublisher("inline")
    async with await RolloutClient.connect(server.url) as client:
        target = PublishTarget(server.url, await client.acquire_control("trainer"))
        await publisher.publish(canary.LAYOUT, canary.tensors(3), [target], target_version=3, timeout_s=20)
        yield await client.generate(PROMPT, SAMPLING, mode=LogprobMode.RAW, timeout_s=20, num_samples=4)
    publisher.close()


async def test_a_lost_repeated_or_wrongly_labelled_token_is_noticed(made: Generation) -> None:
    expectation = canary.Expectation()
    for index, sample in enumerate(made.samples):
        expectation.check(PROMPT, SAMPLING, index, sample)
    index, sample = max(enumerate(made.samples), key=lambda pair: len(pair[1].token_ids))
    end = len(sample.token_ids) - 1
    twice = {name: np.insert(getattr(sample, name), 5, getattr(sample, name)[5]) for name in ("token_ids", "logprobs")}
    other_token, other_logprob = sample.token_ids.copy(), sample.logprobs.copy()
    other_token[end] ^= 1
    other_logprob[end] += 1e-5
    span = sample.spans[0]
    once = {name: np.delete(getattr(sample, name), 5) for name in ("token_ids", "logprobs", "weight_versions")}
    for wrong, said in (
        (replace(sample, **once, spans=(replace(span, length=end),)), "tokens are others"),
        (replace(sample, **twice, weight_versions=np.full(end + 2, 3), spans=(replace(span, length=end + 2),)),
         "tokens are others, the first is number 6"),
        (replace(sample, weight_versions=sample.weight_versions[1:]), f"{end + 1} logprobs, {end} versions"),
        (replace(sample, token_ids=other_token), f"1 of {end + 1} tokens are others, the first is number {end}"),
        (replace(sample, logprobs=other_logprob), "its logprobs are not those of its tokens"),
        (replace(sample, weight_versions=np.full(end + 1, 4)), "tokens are others, the first is number 0"),
        (replace(sample, weight_versions=np.linspace(4, 3, end + 1).astype(int)), "its versions go back"),
        (made.samples[index - 1], "tokens are others"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=said):
            expectation.check(PROMPT, SAMPLING, index, wrong)


def test_what_is_left_behind_is_named(tmp_path: Path) -> None:
    before, folder = Held.now(tmp_path), tmp_path / "skyrl-update.1"
    assert Held.now(tmp_path).beyond(before) == []
    folder.mkdir()
    segment = Segment(1000)
    with socket.socket(), subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        left = Held.now(tmp_path).beyond(before)
        assert child.stdin is not None
        child.stdin.close()
    segments = f"segment {segment.name}", f"mapping of /dev/shm/{segment.name}"
    for name in ("socket", "pipe", f"child {child.pid}", str(folder), *segments):
        assert any(line.startswith(f"1 x {name}") for line in left), f"{name} is not among {left}"
    segment.close()
    folder.rmdir()
    assert Held.now(tmp_path).beyond(before) == []


def test_memory_and_descriptors_that_grow_are_counted() -> None:
    life, kept = Life(os.getpid()), []
    for _ in range(10):
        life.look()
        kept.append((bytearray(os.urandom(8 << 20)), *socket.socketpair()))
    assert life.growth_bytes > 40 << 20 and life.more_descriptors >= 10
    for _, one, other in kept:
        one.close()
        other.close()
