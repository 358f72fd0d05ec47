"""A real reference server as a child of the trainer: started, found dead, never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import skyrl.train.quickstart
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.launch import server
from skyrl.train.launch.server import ServerProcess, ServerStartError, end_all
from skyrl_rollout.health import is_serving

TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"


def config(folder: Path, **engine: object) -> SkyRLTrainConfig:
    keys = {"backend": "reference", "server_start_timeout_s": 60.0} | engine
    return SkyRLTrainConfig.model_validate(
        {"trainer": {"log_path": str(folder), "device": "cpu"}, "generator": {"inference_engine": keys}}
    )


def until(condition, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_started_server_serves_until_it_is_stopped(tmp_path: Path) -> None:
    waited: list[str] = []
    started = ServerProcess.start(config(tmp_path), str(TINY_MODEL), on_wait=waited.append)
    try:
        assert started.alive()
        assert is_serving(started.url)
        assert os.getpgid(started.pid) == started.pid
        assert any("ready url=" in line for line in started.last_lines())
        assert waited
    finally:
        started.stop()
    assert not started.alive()
    assert not is_serving(started.url)
    started.stop()


def test_a_server_that_dies_while_it_starts_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="died while it started") as caught:
        ServerProcess.start(config(tmp_path), str(tmp_path / "no-model"))
    assert "no-model is not a folder" in str(caught.value)


def test_a_server_that_is_killed_while_it_starts_says_by_what(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with pytest.raises(ServerStartError, match=r"died while it started \(killed by SIGSEGV\)"):
        ServerProcess.start(
            config(tmp_path, server_command=[sys.executable, "-c", script, "{listen}"]), str(TINY_MODEL)
        )


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="no-such-command"):
        ServerProcess.start(config(tmp_path, server_command="no-such-command {listen}"), str(TINY_MODEL))


def test_a_server_that_never_serves_is_ended_at_its_deadline(tmp_path: Path) -> None:
    script = "import time, os; print('pid', os.getpid(), flush=True); time.sleep(60)"
    mute = config(tmp_path, server_command=[sys.executable, "-c", script, "{listen}"], server_start_timeout_s=1.0)
    with pytest.raises(ServerStartError, match="server_start_timeout_s") as caught:
        ServerProcess.start(mute, str(TINY_MODEL))
    pid = int(str(caught.value).rsplit("pid ", 1)[1])
    assert until(lambda: gone(pid))


def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = iter([other.getsockname()[1], server.free_port()])
        monkeypatch.setattr(server, "free_port", lambda: next(ports))
        started = ServerProcess.start(config(tmp_path), str(TINY_MODEL))
    try:
        assert str(other) != started.url
        assert is_serving(started.url)
    finally:
        started.stop()


def test_a_start_under_way_in_another_thread_can_be_ended(tmp_path: Path) -> None:
    script = "import time, os; print('pid', os.getpid(), flush=True); time.sleep(60)"
    mute = config(tmp_path, server_command=[sys.executable, "-c", script, "{listen}"])
    errors: list[BaseException] = []

    def start() -> None:
        try:
            ServerProcess.start(mute, str(TINY_MODEL))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert until(lambda: any(file.read_text().startswith("pid") for file in tmp_path.glob("server-*.log")))
    pid = int(next(tmp_path.glob("server-*.log")).read_text().split()[1])
    end_all()
    thread.join(10)
    assert isinstance(errors[0], server.StartAbandoned)
    assert until(lambda: gone(pid))


@pytest.mark.ci
def test_nothing_outlives_a_trainer_that_was_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_server_process import TINY_MODEL, config
        from skyrl.train.launch.server import ServerProcess
        print(ServerProcess.start(config(Path({str(tmp_path)!r})), str(TINY_MODEL)).pid, flush=True)
        time.sleep(60)
    """)
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert not gone(pid)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert until(lambda: gone(pid))
