"""How a server process starts, says that it is healthy, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from raw_calls import ask, fence, raw_calls, refused
from raw_updates import draft, published, version
from skyrl_rollout.cli import main
from skyrl_rollout.reference.process import ReferenceServer, reference_command
from skyrl_rollout.server.health import SERVICES
from skyrl_rollout.server.lifetime import PARENT_FD_VARIABLE
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb
from skyrl_rollout.weights.shm import SHM_DIR

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SLOW = ("--token-delay-ms", "5")


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer(*SLOW) as process:
        yield process


async def test_the_ready_line_names_url_instance_model_and_version(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        info = await calls.engine.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=10)
    assert server.ready["instance"] == info.instance_id
    assert (server.ready["model"], server.ready["version"]) == ("reference", "0")
    assert info.capabilities.abort
    assert not info.capabilities.delta
    assert list(info.capabilities.transports) == ["inline", "shm"]


async def test_a_restarted_server_is_a_new_instance_at_version_zero() -> None:
    ids = []
    for _ in range(2):
        with ReferenceServer() as process:
            async with raw_calls(process) as calls:
                ids.append(process.ready["instance"])
                assert await version(calls) == 0
                await published(calls, await calls.epoch(), draft(1))
            assert process.stop() == 0
    assert ids[0] != ids[1]


async def test_health_is_told_per_service_and_watch_follows_the_state(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        for service in ("", *SERVICES):
            reply = await calls.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == SERVING
        unknown = await refused(calls.health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=5))
        assert unknown.code is grpc.StatusCode.NOT_FOUND
        watch = calls.health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=20)
        assert (await watch.read()).status == SERVING
        epoch = await calls.epoch()
        for admission in (control_pb2.ADMISSION_QUEUE, control_pb2.ADMISSION_REJECT):
            request = control_pb2.PauseRequest(
                fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP, admission=admission
            )
            paused = await calls.engine.Pause(request, timeout=5)
            now = await calls.health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert now.status == (SERVING if admission == control_pb2.ADMISSION_QUEUE else NOT_SERVING)
            await calls.engine.Resume(
                control_pb2.ResumeRequest(fence=fence(epoch), pause_id=paused.pause_id), timeout=5
            )
        assert (await watch.read()).status == NOT_SERVING
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_status_is_told_at_once_and_at_every_interval(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        request = control_pb2.WatchStatusRequest(interval=Duration(nanos=100_000_000))
        began = time.monotonic()
        stream = calls.engine.WatchStatus(request, timeout=10)
        for _ in range(4):
            assert (await stream.read()).state == control_pb2.ENGINE_STATE_SERVING
        stream.cancel()
    assert 0.2 < time.monotonic() - began < 5


async def test_reflection_lists_the_services(server: ReferenceServer) -> None:
    async with raw_calls(server) as calls:
        stub = reflection_pb2_grpc.ServerReflectionStub(calls.channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        replies = [m async for m in stub.ServerReflectionInfo(asked, timeout=5)]
    assert set(SERVICES) < {s.name for s in replies[0].list_services_response.service}


async def test_sigterm_lets_running_work_finish_and_ends_every_stream_with_a_reason() -> None:
    with ReferenceServer(*SLOW, "--drain-grace-s", "1", "--max-running", "6") as process:
        async with raw_calls(process) as calls, raw_calls(process) as others:
            short, long = ask(60), ask(4000)
            waits = ask(5, version=pb.VersionPolicy(min_weight_version=7))
            tasks = [asyncio.create_task(calls.generate(r)) for r in (short, long, waits)]
            watch = calls.health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert (await watch.read()).status == SERVING
            await asyncio.sleep(0.1)
            process.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            error = await refused(others.stream(ask(3)))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            done = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(process.process.wait, 10) == 0
    assert [a.reason() for a in done] == ["LENGTH", "ABORTED", "ABORTED"]
    assert [len(a.tokens()) for a in done][::2] == [60, 0]
    assert all(a.finished[0].num_tokens == len(a.tokens()) for a in done)


async def test_sigterm_while_paused_does_not_wait_for_frozen_work() -> None:
    with ReferenceServer(*SLOW, "--drain-grace-s", "30") as process:
        async with raw_calls(process) as calls:
            task = asyncio.create_task(calls.generate(ask(4000)))
            await asyncio.sleep(0.2)
            epoch = await calls.epoch()
            request = control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP)
            await calls.engine.Pause(request, timeout=5)
            process.process.send_signal(signal.SIGTERM)
            answer = await task
        assert await asyncio.to_thread(process.process.wait, 5) == 0
    assert answer.reason() == "ABORTED"


async def test_a_killed_server_is_seen_as_unavailable() -> None:
    with ReferenceServer(*SLOW) as process:
        async with raw_calls(process) as calls:
            stream = calls.stream(ask(4000))
            await stream.read()
            process.process.kill()
            error = await refused(rest(stream))
    assert error.code is grpc.StatusCode.UNAVAILABLE


def test_a_port_in_use_is_one_line_and_an_exit_code(server: ReferenceServer) -> None:
    done = subprocess.run(reference_command(listen=server.target), capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert server.target in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "listen", "named"),
    [
        ((), "0.0.0.0:0", "--tls-certificate"),
        ((), "nonsense", "host:port"),
        ((), "http://127.0.0.1:80", "host:port"),
        (("--drain-grace-s", "nan"), "127.0.0.1:0", "--drain-grace-s is nan"),
        (("--model", "/nowhere"), "127.0.0.1:0", "/nowhere"),
        (("--max-chunk-bytes", "5"), "127.0.0.1:0", "--max-chunk-bytes"),
    ],
)
def test_a_bad_option_is_one_line_and_an_exit_code(
    flags: tuple[str, ...], listen: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reference", "--listen", listen, *flags]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


async def test_a_unix_socket_serves_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with ReferenceServer(listen=f"unix:{path}") as process:
        async with raw_calls(process) as calls:
            assert len((await calls.generate(ask(3))).tokens()) == 3
        taken = await asyncio.create_subprocess_exec(*reference_command(listen=f"unix:{path}"), stderr=subprocess.PIPE)
        _, said = await taken.communicate()
        assert (taken.returncode, b"in use" in said) == (1, True)
        assert process.stop() == 0
    assert not path.exists()


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.txt"
    path.write_text("kept")
    done = subprocess.run(reference_command(listen=f"unix:{path}"), capture_output=True, text=True, timeout=30)
    assert (done.returncode, path.read_text()) == (1, "kept")
    assert f"{path} is there and is no socket" in done.stderr


def test_the_death_of_the_process_that_started_it_ends_the_server() -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        reference_command(*SLOW, "--drain-grace-s", "0.5"),
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(reading,),
        env=os.environ | {PARENT_FD_VARIABLE: str(reading)},
        start_new_session=True,
    )
    os.close(reading)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        os.close(writing)
        assert process.wait(10) in (0, -signal.SIGKILL)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def test_a_sigkilled_parent_leaves_no_server_behind(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *reference_command(*SLOW)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, segment = parent.stdout.readline().split()
    assert parent.stdout.readline().startswith("ready ")
    assert (SHM_DIR / segment).exists()
    parent.kill()
    parent.wait(10)
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < end, "the server outlived its parent"
        time.sleep(0.05)
    assert not (SHM_DIR / segment).exists(), "the weights of the killed process stay in memory"


async def rest(stream: grpc.aio.UnaryStreamCall) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


PARENT = f"""
import os, subprocess, sys, time
from skyrl_rollout.weights.shm import Segment
segment = Segment(1000)
reading, writing = os.pipe()
env = os.environ | {{{PARENT_FD_VARIABLE!r}: str(reading)}}
child = subprocess.Popen(sys.argv[1:], pass_fds=(reading,), env=env, start_new_session=True, stdout=subprocess.PIPE)
print(child.pid, segment.name, flush=True)
print(child.stdout.readline().decode(), end="", flush=True)
time.sleep(60)
"""
