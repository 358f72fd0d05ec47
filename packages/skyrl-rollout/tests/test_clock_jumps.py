"""The server's wall clock jumps by years, back and forth: leases, deadlines, retention and heartbeats do not notice."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2
from raw_calls import Answer, RawCalls, ask, fence, refused
from raw_updates import begin, draft, forcing, published, state, version
from scripted_process import ScriptedProcess
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ServedProcess, reference_command
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher
from test_publisher import served, weights

pytestmark = pytest.mark.ci
RETENTION_S, WEDGED_AFTER_S = 1.0, 0.8
FLAGS = (
    "--logits", "canary", "--token-delay-ms", "5", "--request-retention-s", str(RETENTION_S),
    "--wedged-after-s", str(WEDGED_AFTER_S),
)  # fmt: skip
SERVING, PAUSED = control_pb2.ENGINE_STATE_SERVING, control_pb2.ENGINE_STATE_PAUSED
LEASE = Duration(nanos=500_000_000)
YEAR_S = 31_557_600
# Loaded before everything else: what asks libc for the time of day, Python and gRPC alike, is told another year every
# 30 ms. The monotonic clock stays as it is.
JUMPING = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int (*of_libc)(clockid_t, struct timespec *);
static time_t years(void) {{
    static const int jumps[] = {{0, 5, -5, 1, -20, 30}};
    struct timespec t;
    of_libc(CLOCK_MONOTONIC, &t);
    return (time_t)jumps[(t.tv_sec * 33 + t.tv_nsec / 30000000) % 6] * {YEAR_S};
}}
int clock_gettime(clockid_t id, struct timespec *t) {{
    if (!of_libc) of_libc = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = of_libc(id, t);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += years();
    return failed;
}}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}}
time_t time(time_t *t) {{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}}
"""


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that $LD_PRELOAD is to name."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler makes the clock of this test")
    folder = tmp_path_factory.mktemp("clock")
    source, library = folder / "jumping_clock.c", folder / "jumping_clock.so"
    source.write_text(JUMPING)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def server(jumping_clock: Path) -> Iterator[ServedProcess]:
    with ServedProcess(["env", f"LD_PRELOAD={jumping_clock}", *reference_command(*FLAGS)]) as process:
        assert jumping_clock.name in Path(f"/proc/{process.pid}/maps").read_text()
        yield process


def test_the_clock_of_this_file_really_jumps(jumping_clock: Path) -> None:
    script = "import time\nfor _ in range(12): print(time.time()); time.sleep(0.02)"
    done = subprocess.run(
        ["env", f"LD_PRELOAD={jumping_clock}", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    seen = sorted(float(line) for line in done.stdout.split())
    assert seen[-1] - seen[0] > 10 * YEAR_S


async def after(began: float, seconds: float) -> None:
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))


async def test_leases_end_when_they_are_over_and_not_before(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    began = time.monotonic()
    await begin(calls, epoch, d, lease=LEASE)
    await calls.engine.Pause(
        control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP, lease=LEASE), timeout=5
    )
    while time.monotonic() < began + 0.4:
        now = await calls.status()
        if time.monotonic() < began + 0.4:
            assert (now.state, now.open_update_id) == (PAUSED, d.update_id), "a lease of 0.5 s ended early"
        await asyncio.sleep(0.02)
    while (now := await calls.status()).state != SERVING or now.open_update_id:
        assert time.monotonic() < began + 3, "a lease of 0.5 s does not end"
        await asyncio.sleep(0.02)
    assert await state(calls, d.update_id) == "ABORTED"


async def test_deadlines_and_graces_are_told_apart_and_kept(calls: RawCalls) -> None:
    graced = {"detach_grace": Duration(seconds=30)}
    for _ in range(10):
        error = await refused(calls.stream(ask(4000, **graced), timeout_s=0.15))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    ended = time.monotonic()
    while (await calls.status()).running:
        assert time.monotonic() < ended + 2, "work whose deadline has passed goes on"
        await asyncio.sleep(0.02)
    first, request = Answer(), ask(600, stream=pb.StreamOptions(min_tokens_per_event=8), **graced)
    for _ in range(8):  # dropped eight times, and never taken for one whose deadline has passed
        request.resume_after = len(first.seqs)
        call = calls.stream(request, timeout_s=30)
        first.take(await call.read())
        call.cancel()
        await asyncio.sleep(0.03)
        assert (await calls.status()).running == 1
    request.resume_after = len(first.seqs)
    rest = await calls.generate(request)
    assert first.seqs + rest.seqs == list(range(1, rest.seqs[-1] + 1))
    assert len(first.tokens()) + len(rest.tokens()) == 600


async def test_an_ended_request_is_kept_for_its_time_and_no_longer(calls: RawCalls) -> None:
    request, other = ask(5, request_id="kept"), ask(6, request_id="kept")
    whole, ended = await calls.generate(request), time.monotonic()
    for _ in range(5):
        assert (await calls.generate(request)).deltas == whole.deltas
        error = await refused(calls.stream(other))
        if time.monotonic() < ended + 0.8 * RETENTION_S:
            assert error.reason == "REQUEST_ID_REUSED"
    await after(ended, RETENTION_S + 0.5)
    assert len((await calls.generate(other)).tokens()) == 6, "it is forgotten: the id may be another request's"


async def test_heartbeats_come_and_work_that_steps_is_never_taken_for_wedged(calls: RawCalls) -> None:
    watch = calls.health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    beat = pb.StreamOptions(final_only=True, heartbeat=Duration(nanos=100_000_000))
    slow = Struct()
    slow.update({"token_delay_s": WEDGED_AFTER_S / 2})
    began = time.monotonic()
    answer = await calls.generate(ask(6, stream=beat, backend_options=slow))
    took = time.monotonic() - began
    assert 0.5 * took / 0.1 <= len(answer.heartbeats) <= 1.2 * took / 0.1 and took > 2 * WEDGED_AFTER_S
    counts = [b.tokens_so_far for b in answer.heartbeats]
    assert counts == sorted(counts) and counts[-1] > counts[0]
    changed = asyncio.ensure_future(watch.read())
    await asyncio.sleep(0.1)
    assert not changed.done(), "health moved while work went on"
    watch.cancel()
    await asyncio.wait((changed,))


async def test_weights_are_published_and_served(server: ServedProcess, calls: RawCalls, epoch: int) -> None:
    async with await RolloutClient.connect(server.url) as client:
        publisher, layout = WeightPublisher(), client.info.model.tensors
        for token in (11, 22):
            target = await version(calls) + 1
            await publisher.publish(
                layout, weights(layout, token), [PublishTarget(server.url, epoch)], target_version=target, timeout_s=20
            )
            assert await served(client) == (target, token)
        publisher.close()


async def test_a_caller_whose_clock_jumps_too_gets_all_its_tokens(
    server: ServedProcess, calls: RawCalls, epoch: int, jumping_clock: Path
) -> None:
    await published(calls, epoch, draft(await version(calls) + 1, forcing(5)))
    agent = ScriptedProcess("agent_process.py", server.url, "jumps", "200", "30", "2", LD_PRELOAD=str(jumping_clock))
    async with agent as process:
        assert await process.line() == "running"
        assert [await process.line() for _ in range(2)] == [" ".join(["5"] * 200)] * 2
