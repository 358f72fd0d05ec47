"""A reference server in a process of its own, for as long as a test or a demonstration needs one."""

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

_READY = re.compile(r"\bready url=(\S+)")


class ReferenceServer:
    """`with ReferenceServer("--model", path) as server:` starts `skyrl-rollout reference` on a free port.

    args: further flags of the command. listen: "127.0.0.1:0" takes a free port; a fixed one lets a restart keep its
    url. The server ends with this process, also when that is killed.
    """

    def __init__(self, *args: str, listen: str = "127.0.0.1:0", start_timeout_s: float = 60.0) -> None:
        self._command = [sys.executable, "-m", "skyrl_rollout.cli", "reference", "--listen", listen, *args]
        self._start_timeout_s = start_timeout_s
        self._lines: deque[str] = deque(maxlen=200)
        self._ready = threading.Event()
        self.url = ""

    def __enter__(self) -> ReferenceServer:
        """Returns when the server is ready. Raises TimeoutError or RuntimeError with its last lines when it is not."""
        watched, self._parent_end = os.pipe()
        self._process = subprocess.Popen(
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
        while not self._ready.wait(0.05):
            if self._process.poll() is not None:
                self._end()
                said = self.last_lines()
                raise RuntimeError(f"the reference server ended with exit code {self._process.returncode}:\n{said}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(
                    f"the reference server was not ready within {self._start_timeout_s:g} s:\n{self.last_lines()}"
                )
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_lines(self, count: int = 20) -> str:
        """What the server wrote last."""
        return "\n".join(list(self._lines)[-count:])

    def kill(self) -> None:
        """SIGKILL: no drain, no goodbye. Harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        self._end()

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, then SIGKILL after `timeout_s`; returns the exit code."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._end()
        return self._process.returncode

    def _end(self) -> None:
        if self._parent_end >= 0:
            os.close(self._parent_end)
            self._parent_end = -1
        self._reader.join(5.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                match = _READY.search(line)
                if match:
                    self.url = match[1]
                    self._ready.set()
