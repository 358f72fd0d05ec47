"""How the suite starts, kills and restarts a server of its own: one command line, and a table of flags."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import grpc.aio

from skyrl_rollout.conformance.item import Failed, NotRun
from skyrl_rollout.conformance.stubs import Stubs
from skyrl_rollout.security import ANONYMOUS, Credentials

START_S = 180.0
LAST_LINES = 15

# What a check wants to set -> how the launched command is told; `--launcher-flags NAME=TEMPLATE` replaces one.
FLAGS: Mapping[str, str] = {
    "drain_grace_s": "--drain-grace-s {value}",
    "max_chunk_bytes": "--max-chunk-bytes {value}",
    "max_concurrent": "--max-concurrent {value}",
    "max_message_bytes": "--max-message-bytes {value}",
    "token_file": "--token-file {value}",
}


class Launcher:
    """Makes servers from a command line in which `{listen}` and `{model}` are filled in.

    flags: overrides of FLAGS; "" says that the command has no such flag.
    """

    def __init__(self, command: str, *, model: Path | None = None, flags: Mapping[str, str] | None = None) -> None:
        """Raises ValueError for a command without {listen}, or with {model} where no model folder is given."""
        if "{listen}" not in command:
            raise ValueError(f"--launcher {command!r} lacks {{listen}}: write e.g. 'my-server --listen {{listen}}'")
        if "{model}" in command and model is None:
            raise ValueError(f"--launcher {command!r} has {{model}}: say which folder with --model")
        unknown = set(flags or {}) - set(FLAGS)
        if unknown:
            raise ValueError(f"--launcher-flags {sorted(unknown)} are not known, expected {sorted(FLAGS)}")
        self.model = model
        self._command, self._flags = shlex.split(command), {**FLAGS, **(flags or {})}

    def sets(self, name: str) -> bool:
        """Whether the command can be told this setting."""
        return bool(self._flags[name])

    def command(self, listen: str, settings: Mapping[str, object], model: Path | None = None) -> list[str]:
        """The command line. Raises NotRun for a setting that the command has no flag for."""
        words = [
            word.replace("{listen}", listen).replace("{model}", str(model or self.model)) for word in self._command
        ]
        for name, value in settings.items():
            if not self.sets(name):
                raise NotRun(f"a launcher flag for {name}")
            for each in value if isinstance(value, list | tuple) else (value,):
                words += [word.replace("{value}", str(each)) for word in shlex.split(self._flags[name])]
        return words


class LaunchedServer:
    """`async with LaunchedServer(...) as server:`; its processes end with the block, and with this process."""

    def __init__(
        self,
        launcher: Launcher,
        settings: Mapping[str, object] | None = None,
        *,
        credentials: Credentials = ANONYMOUS,
        model: Path | None = None,
    ) -> None:
        self._launcher, self._settings, self._model = launcher, dict(settings or {}), model
        self._credentials = credentials
        self._listen = f"127.0.0.1:{_free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._parent_end = -1

    async def __aenter__(self) -> LaunchedServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"grpc://{self._listen}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Returns when it answers. Raises Failed, with its last lines, when it does not."""
        command = self._launcher.command(self._listen, self._settings, self._model)
        watched, self._parent_end = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork is short
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "SKYRL_PARENT_FD": str(watched)},
                pass_fds=[watched],
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"--launcher {command[0]!r} cannot be started: {error.strerror}") from None
        finally:
            os.close(watched)
        await self._answers(time.monotonic() + START_S)

    async def wait(self, timeout_s: float) -> int | None:
        """The exit code, None when it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL for the server and for every process of its session."""
        if self.is_alive:
            os.killpg(self.pid, signal.SIGKILL)
            await self.wait(10)
        self._release()

    async def stop(self, timeout_s: float = 20.0) -> None:
        """SIGTERM, then SIGKILL."""
        if self.is_alive:
            self.terminate()
            if await self.wait(timeout_s) is None:
                await self.kill()
        self._release()

    def last_lines(self) -> str:
        """What it wrote last."""
        self._output.seek(0)
        return "\n".join(self._output.read().decode(errors="replace").splitlines()[-LAST_LINES:])

    async def _answers(self, deadline: float) -> None:
        while True:
            try:
                async with Stubs(self.url, self._credentials) as stubs:
                    await stubs.info(timeout_s=5)
                return
            except grpc.aio.AioRpcError as error:
                said = f"{error.code().name}: {error.details()}"
            if not self.is_alive or time.monotonic() > deadline:
                await self.kill()
                raise Failed(f"the launched server does not answer ({said}); it wrote:\n{self.last_lines()}")
            await asyncio.sleep(0.05)

    def _release(self) -> None:
        if self._parent_end >= 0:
            os.close(self._parent_end)
            self._parent_end = -1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
