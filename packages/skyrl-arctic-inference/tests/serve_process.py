"""`arctic-serve` as tests see it: a process in the server's own environment, started, watched and always ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = Path(os.environ.get("SKYRL_SERVER_ENVIRONMENT", REPOSITORY / ".venvs" / "server"))
ARCTIC_SERVE = ENVIRONMENT / "bin" / "arctic-serve"
TINY_MODEL = REPOSITORY / "packages/skyrl-core/src/skyrl/train/quickstart/tiny_model"
READY = re.compile(r"^ready url=(\S+) .*$", re.MULTILINE)
START_TIMEOUT_S = 180.0
CONTEXT = 512  # of the shared server


def need_environment() -> None:
    """Skips, saying how to get it, where the server's environment is not there."""
    if not ARCTIC_SERVE.is_file():
        pytest.skip(
            f"no {ARCTIC_SERVE}: UV_PROJECT_ENVIRONMENT=.venvs/server uv sync --locked --exact "
            f"--package skyrl-arctic-inference --extra cpu"
        )


class ServeProcess:
    """`with ServeProcess(model, *flags) as server:` returns when the server is ready; `url`, `pid`, `ready_line`."""

    def __init__(
        self, model: Path, *flags: str, listen: str = "127.0.0.1:0", parent_fd: int | None = None, wait: bool = True
    ) -> None:
        need_environment()
        self._command = [str(ARCTIC_SERVE), "--model", str(model), "--listen", listen, *flags]
        self._parent_fd = parent_fd
        self._wait = wait
        self._lines: deque[str] = deque(maxlen=500)
        self.url = self.ready_line = ""
        self.start_s = 0.0

    def __enter__(self) -> ServeProcess:
        env = server_environ()
        fds: tuple[int, ...] = ()
        if self._parent_fd is not None:
            fds, env["SKYRL_PARENT_FD"] = (self._parent_fd,), str(self._parent_fd)
        began = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            pass_fds=fds,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        while self._wait and not self.url:
            if self.process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                self.kill()
                raise AssertionError(f"arctic-serve is not ready, exit code {self.process.poll()}:\n{self.output()}")
            time.sleep(0.05)
        self.start_s = time.monotonic() - began
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(5)

    @property
    def pid(self) -> int:
        return self.process.pid

    def engine_pids(self) -> list[int]:
        """Every process below the front."""
        return descendants(self.pid)

    def output(self) -> str:
        return "\n".join(self._lines)

    def wait(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                if found := READY.match(line):
                    self.ready_line, self.url = found[0], found[1]


def server_environ() -> dict[str, str]:
    """One thread; and bytecode is kept, without which importing vLLM takes a minute."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}


def run_to_end(model: Path | str, *flags: str, listen: str = "127.0.0.1:0", timeout_s: float = 120.0):
    """A start that is expected to fail: the completed process, stderr and stdout as text."""
    need_environment()
    return subprocess.run(
        [str(ARCTIC_SERVE), "--model", str(model), "--listen", listen, *flags],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=server_environ(),
        check=False,
    )


def descendants(pid: int) -> list[int]:
    """Pids of all living processes below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, level = [], {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        found += level
    return found


def is_alive(pid: int) -> bool:
    """False for zombies too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: list[int], timeout_s: float) -> bool:
    """Whether all of `pids` end within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(is_alive(p) for p in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
