"""How fast new weights reach a server, against one core's memcpy in the same run, and what other calls notice of it.

A publish is measured whole, from the call to the committed version: copy and digest into segments that the last publish
left, begin, transfer, seal (digests again, by the server), commit.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.model import ModelFolder
from skyrl_rollout.reference.process import ReferenceServer, ServedProcess
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget, WeightPublisher

from benches.report import Figure, Report, percentile, spread, versions_here
from benches.vllm_environment import TINY_MODEL, server_binary, smollm2
from benches.worker import Worker

PUBLISH_S = 120.0
START_S = 300.0
REST_S = 0.05  # between two publishes: the pings of one do not wait for the next
GB = 1e9
P99_MS = 100.0
INLINE_GB_PER_S = 0.25
LEAST_PINGS = 100  # a 99th percentile needs so many


@dataclass(frozen=True)
class Way:
    """A server and a transport. at_least: bound of the rate, as a share of memcpy (shm) or in GB/s (inline)."""

    server: str
    transport: str
    rounds: int
    at_least: float

    @property
    def name(self) -> str:
        return f"{self.server}, {self.transport}"


def ways(small: bool) -> tuple[Way, ...]:
    """What is measured, in this order; in small without vLLM."""
    if small:
        return Way("reference", "shm", 3, 0.12), Way("reference", "inline", 2, INLINE_GB_PER_S)
    return (
        Way("reference", "shm", 20, 0.12),
        Way("reference", "inline", 5, INLINE_GB_PER_S),
        Way("vllm", "shm", 5, 0.04),
        Way("vllm", "inline", 3, INLINE_GB_PER_S),
    )


@dataclass
class Rounds:
    """What the publishes of one way gave. rates, memcpy_rates: bytes/s; pings: latencies of calls during publishes."""

    nbytes: int = 0
    rates: list[float] = field(default_factory=list)
    memcpy_rates: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    pings_s: list[float] = field(default_factory=list)
    idle_pings_s: list[float] = field(default_factory=list)


async def measure(small: bool) -> Report:
    """Rates, phases and latencies per way; the bytes are those of the model."""
    model = TINY_MODEL if small else smollm2()
    folder = ModelFolder(model)
    layout = folder.identity.tensors
    tensors = [(t.name, folder.read(t.name)) for t in layout]
    figures: list[Figure] = []
    for way in ways(small):
        rounds = Rounds(nbytes=sum(t.nbytes for t in layout))
        with serving(way.server, model) as server:
            await publish_rounds(server.url, way, folder, tensors, rounds)
        figures += figures_of(way, rounds)
    settings = {"model": model.name, "GB": round(rounds.nbytes / GB, 3), "tensors": len(layout)}
    return Report("weights", figures, settings, not small, versions_here())


def serving(name: str, model: Path) -> ServedProcess:
    """The server of that name in the root's servers table, with this model in float32."""
    if name == "reference":
        return ReferenceServer("--model", str(model), "--logits", "canary")
    command = [str(server_binary("arctic-serve")), "--model", str(model), "--listen", "127.0.0.1:0"]
    return ServedProcess([*command, "--dtype", "float32", "--max-model-len", "512"], start_timeout_s=START_S)


async def publish_rounds(
    url: str, way: Way, folder: ModelFolder, tensors: list[tuple[str, memoryview]], rounds: Rounds
) -> None:
    """One publish that takes the memory, then rounds of memcpy and publish beside a pinging process."""
    async with published_by(url, way.transport) as (publisher, target), pinging(url) as pinger:
        source = np.frombuffer(b"".join(data for _, data in tensors), np.uint8)
        copied = source.copy()
        for number in range(way.rounds + 1):
            memcpy_rate = memcpy(source, copied)
            await asyncio.sleep(REST_S)
            began = time.monotonic()
            report = await publisher.publish(
                folder.identity.tensors, tensors, [target], target_version=number + 1, timeout_s=PUBLISH_S
            )
            if number:
                note(rounds, report, memcpy_rate, (began, time.monotonic()))
            await asyncio.sleep(REST_S)
        for due_s, latency_s in await pinger.ask("calls"):
            during = any(begin <= due_s <= end for begin, end in rounds.spans)
            (rounds.pings_s if during else rounds.idle_pings_s).append(latency_s)


@contextlib.asynccontextmanager
async def published_by(url: str, transport: str) -> AsyncIterator[tuple[WeightPublisher, PublishTarget]]:
    """A publisher and the one server that it publishes to."""
    async with await RolloutClient.connect(url, timeout_s=30) as client:
        epoch = await client.acquire_control("bench")
    publisher = WeightPublisher(transport)
    try:
        yield publisher, PublishTarget(url, epoch)
    finally:
        publisher.close()


@contextlib.asynccontextmanager
async def pinging(url: str) -> AsyncIterator[Worker]:
    """A worker that calls the server at 50 Hz."""
    async with Worker("benches.pinger", url) as worker:
        while not await worker.ask("calls"):
            await asyncio.sleep(0.1)
        yield worker


def memcpy(source: np.ndarray, target: np.ndarray) -> float:
    """Bytes/s of one core that copies `source` over memory that is there already; the best of three."""
    times_s = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        times_s.append(time.perf_counter() - began)
    return source.nbytes / min(times_s)


def note(rounds: Rounds, report: PublishReport, memcpy_rate: float, span: tuple[float, float]) -> None:
    """One more round."""
    rounds.rates.append(rounds.nbytes / report.total_s)
    rounds.memcpy_rates.append(memcpy_rate)
    rounds.phases.append(report.seconds)
    rounds.spans.append(span)


def figures_of(way: Way, rounds: Rounds) -> list[Figure]:
    """Medians over the rounds; the share of memcpy is that of each round's own."""
    rate, memcpy_rate = spread(rounds.rates)[0], spread(rounds.memcpy_rates)[0]
    share = spread([a / b for a, b in zip(rounds.rates, rounds.memcpy_rates, strict=True)])[0]
    is_shared = way.transport == "shm"
    figures = [
        Figure(f"{way.name}: publish", rate / GB, "GB/s", at_least=None if is_shared else way.at_least),
        Figure(f"{way.name}: memcpy", memcpy_rate / GB, "GB/s"),
        Figure(f"{way.name}: publish over memcpy", share, "", at_least=way.at_least if is_shared else None),
    ]
    for phase in rounds.phases[0]:
        seconds = spread([phases[phase] for phases in rounds.phases])[0]
        figures.append(Figure(f"{way.name}: {phase}", seconds * 1e3, "ms"))
    for what, latencies_s, bound in (("meanwhile", rounds.pings_s, P99_MS), ("else", rounds.idle_pings_s, None)):
        if len(latencies_s) >= LEAST_PINGS:
            p99_ms = percentile(latencies_s, 0.99) * 1e3
            figures.append(Figure(f"{way.name}: p99 of other calls {what}", p99_ms, "ms", at_most=bound))
    return figures
