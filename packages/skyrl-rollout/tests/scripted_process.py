"""A Python process that a test writes to, reads from, stops, continues and kills, as it would a trainer of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Self

HERE = Path(__file__).parent
LINE_TIMEOUT_S = 30.0


class ScriptedProcess:
    """`async with ScriptedProcess("trainer_process.py", *arguments) as process:`; it is gone afterwards."""

    def __init__(self, script: str, *arguments: str, **environ: str) -> None:
        self._command = [sys.executable, str(HERE / script), *arguments]
        self._environ = {**os.environ, **environ}

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=self._environ
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def line(self) -> str:
        """The next line that it prints; fails, with what it wrote to stderr, where it ends instead."""
        assert self._process.stdout is not None
        async with asyncio.timeout(LINE_TIMEOUT_S):
            line = (await self._process.stdout.readline()).decode().strip()
        if not line:
            _, said = await self.end()
            raise AssertionError(f"the process ended instead of saying something:\n{said}")
        return line

    async def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL; returns when the kernel has ended it."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> tuple[int, str]:
        """(exit code, what it wrote to stderr) once it ends by itself."""
        assert self._process.stderr is not None
        async with asyncio.timeout(LINE_TIMEOUT_S):
            said = (await self._process.stderr.read()).decode()
            return await self._process.wait(), said
