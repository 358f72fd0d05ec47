"""A rollout server in a process of its own, for as long as a test or a demonstration needs one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from skyrl_rollout.channel import parse_url

_READY = re.compile(r"\bready (url=\S+.*)")


class ServedProcess:
    """`with ServedProcess(command) as server:` starts any server that says `ready url=...` and ends it afterwards.

    ready: what the ready line says, key -> value. The server ends with this process, also when that is killed.
    """

    def __init__(self, command: Sequence[str], *, start_timeout_s: float = 60.0) -> None:
        self._command = list(command)
        self._start_timeout_s = start_timeout_s
        self._lines: deque[str] = deque(maxlen=200)
        self._said_ready = threading.Event()
        self.ready: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Returns when the server is ready. Raises TimeoutError or RuntimeError with its last lines when it is not."""
        watched, self._parent_end = os.pipe()
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SKYRL_PARENT_FD": str(watched), "OMP_NUM_THREADS": "1"},
            pass_fds=[watched],
            start_new_session=True,
        )
        os.close(watched)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + self._start_timeout_s
        while not self._said_ready.wait(0.05):
            if not self.alive:
                self._end()
                raise RuntimeError(f"the server ended with exit code {self.process.returncode}:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the server was not ready within {self._start_timeout_s:g} s:\n{self.last_lines()}")
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self.ready["url"]

    @property
    def target(self) -> str:
        """The address as gRPC dials it."""
        return parse_url(self.url).target

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def last_lines(self, count: int = 20) -> str:
        """What the server wrote last."""
        return "\n".join(list(self._lines)[-count:])

    def kill(self) -> None:
        """SIGKILL: no drain, no goodbye. Harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        self._end()

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, then SIGKILL after `timeout_s`; returns the exit code."""
        if self.alive:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._end()
        return self.process.returncode

    def _end(self) -> None:
        if self._parent_end >= 0:
            os.close(self._parent_end)
            self._parent_end = -1
        self._reader.join(5.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                if match := _READY.search(line):
                    self.ready = dict(part.split("=", 1) for part in match[1].split())
                    self._said_ready.set()


class ReferenceServer(ServedProcess):
    """`with ReferenceServer("--model", path) as server:` starts `skyrl-rollout reference` on a free port.

    flags: further flags of the command. listen: "127.0.0.1:0" takes a free port; a fixed one lets a restart keep its
    url.
    """

    def __init__(self, *flags: str, listen: str = "127.0.0.1:0") -> None:
        super().__init__(reference_command(*flags, listen=listen))


def reference_command(*flags: str, listen: str = "127.0.0.1:0") -> list[str]:
    """The command line of a reference server under this Python."""
    return [sys.executable, "-m", "skyrl_rollout.cli", "reference", "--listen", listen, *flags]
