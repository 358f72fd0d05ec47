"""Items 17 to 22: silence, size and crowds."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from skyrl_rollout.conformance.answers import Reading
from skyrl_rollout.conformance.item import Failed, NotRun, expect
from skyrl_rollout.conformance.stubs import refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb

BEAT_S, BEATS, SLACK = 0.4, 4, 1.5
SILENT_S, SILENT_SHORT_S = 60.0, 6.0
MANY_TOKENS, TOP, TOP_BYTES = 32_768, 20, 8
CROWD, WATCHES, WATCH_P99_S = 1000, 100, 0.2
WATCH_ROUNDS = 3  # the best counts: other work on the machine slows one, a slow server all
BETWEEN_WATCHES_S = 0.01
MOST_OPENED = 8192
SLOW_READERS = 8
GROWTH_BYTES = 256 << 20
BESIDE_S = 10.0


async def heartbeats_come(target: Target) -> None:
    """Item 17."""
    stream = pb.StreamOptions(min_tokens_per_event=1 << 20)
    stream.heartbeat.FromNanoseconds(int(BEAT_S * 1e9))
    stream.max_event_delay.FromSeconds(3600)
    trainer = await target.trainer()
    running = target.read(target.ask_long(stream=stream, pace_s=0.05))
    await running.until(lambda a: a.started is not None, "Started")
    await check_beats(running, pb.Heartbeat.PHASE_RUNNING)
    target.need("pause_modes:keep")
    if running.answer.finished:
        raise Failed("the work of the whole context ended before it could be paused")
    pause = await trainer.pause(control_pb2.PAUSE_MODE_KEEP)
    queued = target.read(target.ask(4, stream=stream))
    await asyncio.gather(
        check_beats(running, pb.Heartbeat.PHASE_PAUSED), check_beats(queued, pb.Heartbeat.PHASE_QUEUED)
    )
    await trainer.resume(pause.pause_id)
    await queued.rest()
    running.drop()


async def check_beats(reading: Reading, phase: int) -> None:
    """The next heartbeats of this phase come at most 1.5 intervals apart. Raises Failed."""
    name = pb.Heartbeat.Phase.Name(phase)
    times: list[float] = []
    deadline = time.monotonic() + BEAT_S * (BEATS + 4)
    while len(times) < BEATS:
        seen = len(reading.answer.heartbeats)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                if await reading.next() is None:
                    raise Failed(f"the stream ended while {name} heartbeats were awaited")
        except TimeoutError:
            raise Failed(f"{len(times)} heartbeats of {name} came in {BEAT_S * (BEATS + 4):g} s") from None
        beats = reading.answer.heartbeats
        if len(beats) > seen and beats[-1].phase == phase:
            times.append(time.monotonic())
    gap = max(b - a for a, b in pairwise(times))
    expect(gap <= BEAT_S * SLACK, f"{gap:.2f} s between two heartbeats of {name}, the interval is {BEAT_S} s")


async def silence_survives_pings(target: Target) -> str:
    """Item 18."""
    silent_s = SILENT_S if target.full_length else SILENT_SHORT_S
    async with target.opened(ping_interval_ms=1000) as stubs:
        request = health_pb2.HealthCheckRequest(service="skyrl_rollout.v1.EngineService")
        watch = stubs.health.Watch(request, timeout=None)
        await watch.read()
        ended = asyncio.ensure_future(watch.read())
        await asyncio.wait((ended,), timeout=silent_s)
        if ended.done():
            raise Failed(f"a silent call with a ping every second did not stay open: {ended.exception() or 'it ended'}")
        await stubs.info()
        watch.cancel()
        await asyncio.wait((ended,))
    return f"{silent_s:g} s of silence"


async def messages_are_bounded(target: Target) -> str:
    """Item 19."""
    limit = target.info.limits.max_message_bytes
    expect(limit > 0, "Limits.max_message_bytes is 0: a client cannot know what to accept")
    prompt = target.prompt()
    room = min(MANY_TOKENS, target.context - len(prompt))
    as_much = -(-TOP * MANY_TOKENS // room)  # where the context is shorter, there is more beside each token
    top = min(as_much, target.info.limits.max_top_logprobs)
    count = min(room, 2 * limit // (TOP_BYTES * max(top, 1)) + 1)  # what fits into no single message is enough
    extras = [pb.EXTRA_ROUTED_EXPERTS] if target.offers("extras:routed_experts") else []
    request = target.ask(count, prompt=prompt, top=top, extras=extras, stream=pb.StreamOptions(final_only=True))
    reading = target.read(request, timeout_s=120)
    largest = total = 0
    while (m := await reading.next()) is not None:
        largest, total = max(largest, m.ByteSize()), total + m.ByteSize()
    expect(len(reading.answer.tokens()) == count, f"{len(reading.answer.tokens())} of {count} tokens came")
    expect(largest <= limit, f"a message has {largest} bytes, max_message_bytes is {limit}")
    return (
        f"{count} tokens x top-{top}{' x experts' if extras else ''}: {total} bytes, at most {largest} in one message"
    )


async def status_stays_quick(target: Target) -> str:
    """Item 20."""
    limit = target.info.limits.max_concurrent or MOST_OPENED
    crowd = min(CROWD, limit)
    stream = pb.StreamOptions(min_tokens_per_event=1 << 20)
    stream.max_event_delay.FromSeconds(3600)
    stream.heartbeat.FromSeconds(3600)
    readings: list[Reading] = []
    try:
        async with paused(target):  # else a busy engine is slow to take so many
            for _ in range(crowd):
                readings.append(target.read(target.ask_long(stream=stream, pace_s=1.0), timeout_s=120))
            await until_held(target, crowd)
        p99, held = math.inf, []
        for _ in range(WATCH_ROUNDS):
            times = []
            for _ in range(WATCHES):
                began = time.monotonic()
                held.append(await num_held(target))
                times.append(time.monotonic() - began)
                await asyncio.sleep(BETWEEN_WATCHES_S)
            p99 = min(p99, sorted(times)[int(0.99 * (WATCHES - 1))])
            if p99 < WATCH_P99_S:
                break
    finally:
        for reading in readings:
            reading.drop()
    least = min(held)
    expect(least >= crowd // 2, f"{least} of {crowd} streams were left, though nobody dropped them")
    expect(p99 < WATCH_P99_S, f"WatchStatus p99 is {p99 * 1e3:.0f} ms with {crowd} open streams, expected below 200 ms")
    return f"{max(held)} to {least} streams, p99 {p99 * 1e3:.0f} ms"


@asynccontextmanager
async def paused(target: Target) -> AsyncIterator[None]:
    """Nothing runs within, where the server can freeze its work."""
    if not target.offers("pause_modes:keep"):
        yield
        return
    trainer = await target.trainer()
    pause = await trainer.pause(control_pb2.PAUSE_MODE_KEEP, lease_s=60)
    yield
    await trainer.resume(pause.pause_id)


async def num_held(target: Target) -> int:
    """How many requests the server has accepted and not ended."""
    status = await target.stubs.status()
    return status.running + status.waiting + status.frozen


async def until_held(target: Target, count: int) -> None:
    """Returns when so many requests are held. Raises Failed after 30 s."""
    for _ in range(300):
        held = await num_held(target)
        if held >= count:
            return
        await asyncio.sleep(0.1)
    raise Failed(f"the server holds {held} of {count} requests 30 s after they were sent")


async def overload_is_refused(target: Target) -> str:
    """Item 21."""
    limit = target.info.limits.max_concurrent
    if not 0 < limit <= MOST_OPENED:
        raise NotRun(f"a server whose max_concurrent is 1 to {MOST_OPENED}, not {limit}")
    target.need("pause_modes:keep")
    trainer = await target.trainer()
    await trainer.pause(control_pb2.PAUSE_MODE_KEEP, lease_s=60)
    stream = pb.StreamOptions()
    stream.heartbeat.FromSeconds(3600)
    readings = [target.read(target.ask(2, stream=stream)) for _ in range(limit)]
    try:
        await until_held(target, limit)
        error = await refused(
            target.read(target.ask(2), timeout_s=10).call,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            what=f"request {limit + 1} with max_concurrent {limit}",
        )
        expect(error.retry_after_s is not None, "RESOURCE_EXHAUSTED came without RetryInfo")
    finally:
        for reading in readings:
            reading.drop()
    await target.quiet(10)
    return f"{limit} requests"


async def slow_readers_harm_nobody(target: Target) -> str:
    """Item 22."""
    top = min(TOP, target.info.limits.max_top_logprobs)
    count = min(4000, target.context - 8)
    before = memory_nbytes(target)
    async with target.opened() as other:
        slow = [target.read(target.ask(count, top=top), stubs=other) for _ in range(SLOW_READERS)]
        for reading in slow:
            await reading.next()
        try:
            async with asyncio.timeout(BESIDE_S):
                for _ in range(5):
                    await target.answer(target.ask(8))
        except TimeoutError:
            raise Failed(f"5 short requests beside {SLOW_READERS} slow readers took over {BESIDE_S:g} s") from None
        grown = memory_nbytes(target) - before
        for reading in slow:
            reading.drop()
    expect(grown < GROWTH_BYTES, f"{SLOW_READERS} slow readers made the server grow by {grown >> 20} MiB")
    if target.server is None:
        return "its memory could not be seen: that needs a server that the suite launched"
    return f"{SLOW_READERS} readers of {count} tokens x top-{top}: {max(grown, 0) >> 20} MiB"


def memory_nbytes(target: Target) -> int:
    """Resident bytes of the launched server and its children, 0 for a server of others."""
    if target.server is None:
        return 0
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == target.server.pid:  # the session that it leads
                total += int(fields[21]) * 4096
    return total
