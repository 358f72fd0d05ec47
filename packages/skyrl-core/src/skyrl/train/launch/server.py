"""One rollout server as a child of the trainer: started, watched until it serves, and never left behind.

The child holds the read end of a pipe whose write end only the trainer has: when the trainer is gone, however it went,
the server sees the end of the pipe, drains and ends its own process group.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_rollout.health import is_serving

from skyrl.train.launch import command, cores, environment, gpus, table
from skyrl.train.launch.device import device_of, server_dtype

log = logging.getLogger(__name__)

PARENT_FD = "SKYRL_PARENT_FD"
# Characters of the server's latest line that a progress line has room for.
SHOWN = 60
PORT_TRIES = 5
POLL_S = 0.25
STOP_GRACE_S = 15.0
LAST_LINES = 25
PORT_TAKEN = re.compile(r"(address|port)\b.*\bin use", re.IGNORECASE)
OnWait = Callable[[str], None]

_numbers = itertools.count()
_starts: set[threading.Event] = set()
_running: set[ServerProcess] = set()


class ServerStartError(ValueError):
    """A server that did not come to serve; the message ends with the last lines that it wrote."""


class PortInUse(ServerStartError):
    """Another process took the port between choosing and binding it."""


class StartAbandoned(ServerStartError):
    """The run ends before its server served."""


def end_all(*, timeout_s: float = 30.0) -> None:
    """Ends every server of this process: those that run, and those whose start is under way in whatever thread."""
    deadline = time.monotonic() + timeout_s
    for start in tuple(_starts):
        start.set()
    while _starts and time.monotonic() < deadline:
        time.sleep(0.05)
    for server in tuple(_running):
        server.stop()


class ServerProcess:
    """A started server. `url` is where it serves, `pid` its process (and process group)."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_file: Path, pipe: int) -> None:
        self.url, self.log_file = url, log_file
        self._process, self._pipe = process, pipe
        self._stopped = False
        _running.add(self)

    @classmethod
    def start(cls, cfg: Any, model_path: str, *, on_wait: OnWait = lambda what: None) -> ServerProcess:
        """Prepares the server's environment, starts the server and returns when it serves.

        Blocks; `on_wait` is told once a second what is waited for. ServerStartError shows the server's last lines;
        ValueError for a server that is not in the table. Nothing is left running after an error.
        """
        abandoned = threading.Event()

        def waiting(what: str) -> None:
            if abandoned.is_set():
                raise StartAbandoned("the run ended before its server served")
            on_wait(what)

        _starts.add(abandoned)
        try:
            return cls._start(cfg, str(model_path), next(_numbers), waiting)
        finally:
            _starts.discard(abandoned)

    @classmethod
    def _start(cls, cfg: Any, model_path: str, number: int, on_wait: OnWait) -> ServerProcess:
        device = device_of(cfg)
        entry = table.find(cfg.generator.inference_engine)
        binaries, in_use = Path(sys.executable).parent, None
        if entry.package is not None:
            on_wait("the server's environment")
            binaries, in_use = environment.ensure(entry, device, on_wait)
        try:
            for attempt in itertools.count(1):
                try:
                    return cls._start_once(cfg, entry, model_path, number, binaries, in_use, on_wait)
                except PortInUse:
                    if attempt == PORT_TRIES:
                        raise
                    log.info("the server's port was taken by another process; trying another port")
        finally:
            if in_use is not None:
                os.close(in_use)  # the server holds its own copy
        raise AssertionError

    @classmethod
    def _start_once(
        cls,
        cfg: Any,
        entry: table.ServerEntry,
        model_path: str,
        number: int,
        binaries: Path,
        in_use: int | None,
        on_wait: OnWait,
    ) -> ServerProcess:
        engine, device = cfg.generator.inference_engine, device_of(cfg)
        port = free_port()
        values = {
            "model": model_path,
            "listen": f"127.0.0.1:{port}",
            "dtype": server_dtype(cfg),
            "seed": str(cfg.trainer.seed),
        }
        lora = cfg.trainer.policy.model.lora
        arguments = command.build(entry, engine, values, device=device, binaries=binaries, lora=lora)
        folder = cfg.trainer.log_folder
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / f"server-{number}.log"
        server_cores = _cores(cfg, number) if device == "cpu" else None
        variables = _variables(cfg, number, device, binaries, server_cores)
        server = cls._spawn(arguments, variables, f"grpc://127.0.0.1:{port}", log_file, in_use)
        log.info("starting server %d: %s (its log: %s)", number, shlex.join(arguments), log_file)
        try:
            if server_cores:
                os.sched_setaffinity(server.pid, server_cores)
            server._wait_until_serving(engine.server_start_timeout_s, on_wait)
        except BaseException:
            server.stop(grace_s=2.0)
            raise
        return server

    @classmethod
    def _spawn(
        cls, arguments: list[str], variables: dict[str, str], url: str, log_file: Path, in_use: int | None
    ) -> ServerProcess:
        read_end, write_end = os.pipe()
        inherited = (read_end,) if in_use is None else (read_end, in_use)
        try:
            with log_file.open("wb") as sink:
                process = subprocess.Popen(
                    arguments,
                    env=variables | {PARENT_FD: str(read_end)},
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                    process_group=0,
                )
        except OSError as error:
            os.close(write_end)
            raise ServerStartError(
                f"the server's command cannot be started: {shlex.join(arguments)}: {error.strerror}\n{table.FORMS}"
            ) from error
        finally:
            os.close(read_end)
        return cls(process, url, log_file, write_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def ended_by(self) -> str:
        """How a dead server ended: its exit code, or the signal that killed it."""
        code = self._process.poll()
        if code is None or code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")

    def last_lines(self, n: int = LAST_LINES) -> list[str]:
        """The last lines that the server wrote to its log."""
        if not self.log_file.is_file():
            return []
        with self.log_file.open("rb") as file:
            file.seek(max(0, self.log_file.stat().st_size - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-n:]

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Asks the server to drain, then ends its process group. Safe to call twice, and after its death."""
        if self._stopped:
            return
        self._stopped = True
        _running.discard(self)
        try:
            if self.alive():
                self._process.terminate()
                self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            log.warning("server %s did not end within %.0f s and is killed", self.url, grace_s)
        finally:
            _end_group(self.pid)
            self._process.wait(5)
            os.close(self._pipe)

    def _wait_until_serving(self, timeout_s: float, on_wait: OnWait) -> None:
        started = time.monotonic()
        while not is_serving(self.url):
            seconds = time.monotonic() - started
            if not self.alive():
                self._raise_dead()
            if seconds > timeout_s:
                raise ServerStartError(
                    f"the server at {self.url} does not serve after {timeout_s:.0f} s "
                    f"(generator.inference_engine.server_start_timeout_s); it said last:\n{self._said()}"
                )
            on_wait(f"the server: {seconds:.0f} s, {self._doing()}")
            time.sleep(POLL_S)

    def _raise_dead(self) -> None:
        kind = PortInUse if PORT_TAKEN.search("\n".join(self.last_lines())) else ServerStartError
        raise kind(
            f"the server died while it started ({self.ended_by}); it said last ({self.log_file}):\n{self._said()}"
        )

    def _said(self) -> str:
        return "\n".join(f"  | {line}" for line in self.last_lines()) or "  (it said nothing)"

    def _doing(self) -> str:
        """The server's latest line, short enough for a progress line."""
        lines = [line.strip() for line in self.last_lines(5) if line.strip()]
        latest = lines[-1] if lines else "loading"
        return latest if len(latest) <= SHOWN else f"... {latest[-SHOWN:]}"


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _cores(cfg: Any, number: int) -> tuple[int, ...] | None:
    num_servers = cfg.generator.inference_engine.num_servers
    plan = cores.plan(num_servers)
    return plan.servers[number % num_servers] if plan else None


def _variables(
    cfg: Any, number: int, device: str, binaries: Path, server_cores: tuple[int, ...] | None
) -> dict[str, str]:
    """The server's environment variables: the trainer's, its own binaries first, its cores or GPUs."""
    left_out = ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables["PATH"] = f"{binaries}{os.pathsep}{variables.get('PATH', os.defpath)}"
    variables["PYTHONUNBUFFERED"] = "1"
    if server_cores:
        variables |= cores.server_environ(server_cores)
    if device == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = gpus.server_gpus(cfg, number % cfg.generator.inference_engine.num_servers)
    return variables


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # it is empty: every process of it ended by itself
