"""Items 49 and 54: what a killed server forgets, and how one that is told to stop ends its streams."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from skyrl_rollout.conformance.item import Failed, expect
from skyrl_rollout.conformance.launching import LaunchedServer
from skyrl_rollout.conformance.stubs import OK, Stubs, outcome
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.security import ANONYMOUS
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.shm import SHM_DIR

DRAIN_SLACK_S = 15.0
DEFAULT_GRACE_S = 10.0
OTHERS_S = 2.0  # for segments that others have made and not mapped yet, or not removed yet


@dataclass(frozen=True)
class Restart:
    """A server before and after kill -9: its info, what became of its open update, and new names in /dev/shm."""

    before: control_pb2.GetServerInfoResponse
    after: control_pb2.GetServerInfoResponse
    update_code: grpc.StatusCode
    leftovers: list[str]


async def restarted(target: Target) -> Restart:
    """Kills and restarts the victim once, with a committed version and an open update; later calls get the record."""
    if "restart" in target.shared:
        record: Restart = target.shared["restart"]
        return record
    server = await target.victim()
    names = set(os.listdir(SHM_DIR)) if SHM_DIR.is_dir() else set()
    async with opened(target, server) as stubs:
        there = seen(target, server, stubs)
        trainer = await there.trainer()
        version = await trainer.version() + 1
        await trainer.publish(target.noise(version))
        update = await trainer.stage(target.noise(version + 1))
        before = await stubs.info()
    await server.kill()
    await server.start()
    async with opened(target, server) as stubs:
        after = await stubs.info()
        error = await outcome(stubs.weights.GetUpdate(pb.GetUpdateRequest(update_id=update.update_id)))
    left = await left_in_shm(names, session=server.pid)
    target.shared["restart"] = Restart(before, after, error.code if error else OK, left)
    return await restarted(target)


async def left_in_shm(names: set[str], *, session: int) -> list[str]:
    """What is in /dev/shm beyond `names` and stays there, though no process outside of this session uses it: the
    segments of others on this machine come and go."""
    deadline = time.monotonic() + OTHERS_S
    while True:
        new = set(os.listdir(SHM_DIR)) - names if SHM_DIR.is_dir() else set()
        left = {name for name in new if not name.startswith("conformance-")}
        if left:
            left -= used_by_others(session)
        if not left or time.monotonic() > deadline:
            return sorted(left)
        await asyncio.sleep(0.1)


def used_by_others(session: int) -> set[str]:
    """Names in /dev/shm that processes of other sessions have mapped, as far as this user may see them."""
    used: set[str] = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                mapped = (line.partition(f"{SHM_DIR}/")[2] for line in (process / "maps").read_text().splitlines())
                used |= {name.removesuffix(" (deleted)") for name in mapped if name}
    return used


async def restart_forgets(target: Target) -> None:
    """Item 49."""
    record = await restarted(target)
    expect(record.before.instance_id != record.after.instance_id, "instance_id is the same after kill -9 and a restart")
    version = record.after.weight_versions[""]
    expect(version == 0, f"version {version} after a restart, expected 0: the model as loaded")
    expect(
        record.update_code is grpc.StatusCode.NOT_FOUND,
        f"GetUpdate of an update from before the restart ended with {record.update_code.name}, expected NOT_FOUND",
    )


async def sigterm_drains(target: Target) -> str:
    """Item 54."""
    server = await target.victim()
    async with opened(target, server) as stubs, opened(target, server) as other:
        there = seen(target, server, stubs)
        watch = other.health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        first = await watch.read()
        expect(first.status == health_pb2.HealthCheckResponse.SERVING, "health is not SERVING before SIGTERM")
        short = there.read(there.ask(20, pace_s=0.01))
        readings = [short, *(there.read(there.ask_long(pace_s=0.05)) for _ in range(2))]
        for reading in readings:
            await reading.tokens(1)
        began = time.monotonic()
        server.terminate()
        told = await asyncio.wait_for(watch.read(), 10)
        expect(
            told is not grpc.aio.EOF and told.status == health_pb2.HealthCheckResponse.NOT_SERVING,
            "health Watch did not say NOT_SERVING after SIGTERM",
        )
        late = await outcome(there.read(there.ask(2)).call)
        expect(
            late is not None and late.code is grpc.StatusCode.UNAVAILABLE,
            f"a request after SIGTERM ended with {late.code.name if late else 'OK'}, expected UNAVAILABLE",
        )
        for reading in readings:
            try:
                await reading.rest()
            except grpc.aio.AioRpcError as error:
                raise Failed(f"SIGTERM ended a stream with {error.code().name}, expected SampleFinished") from None
            reading.answer.reason()
        watch.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await watch.read()
    grace_s = target.shared.get("drain_grace_s", DEFAULT_GRACE_S)
    code = await server.wait(grace_s + DRAIN_SLACK_S)
    took = time.monotonic() - began
    expect(code is not None, f"the server still runs {took:.0f} s after SIGTERM, its drain grace is {grace_s:g} s")
    return f"exit code {code} after {took:.1f} s; {', '.join(reading.answer.reason() for reading in readings)}"


def opened(target: Target, server: LaunchedServer) -> Stubs:
    """A connection to the victim."""
    return Stubs(server.url, target.credentials if server is target.server else ANONYMOUS)


def seen(target: Target, server: LaunchedServer, stubs: Stubs) -> Target:
    """The victim as a target: the same model, other stubs."""
    return Target(server.url, stubs, target.info, credentials=target.credentials, launcher=target.launcher)
