"""A process of a bench's own that answers lines of JSON: asked over stdin, it answers on a pipe that only it has."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

ANSWER_FD_VARIABLE = "BENCH_ANSWER_FD"
MAX_LINE_BYTES = 64 << 20
END_S = 20.0
TOOLS = Path(__file__).resolve().parents[1]


class Worker:
    """`async with Worker("benches.pinger", url) as worker: await worker.ask({...})`; its process ends with the block.

    What it prints goes to stderr: imported libraries print too. python: of the environment that it needs.
    """

    def __init__(self, module: str, *arguments: str, python: str = sys.executable) -> None:
        self._module = module
        self._command = [python, "-m", module, *arguments]

    async def __aenter__(self) -> Self:
        read_fd, write_fd = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                env={**os.environ, ANSWER_FD_VARIABLE: str(write_fd), "PYTHONPATH": str(TOOLS)},
                pass_fds=[write_fd],
            )
        finally:
            os.close(write_fd)
        self._answers = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(self._answers)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_fd, "rb"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def ask(self, question: object) -> Any:
        """The answer to one question. Raises RuntimeError when the process ended instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._answers.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with exit code {await self._process.wait()}, see above")
        return json.loads(line)


async def answer_questions(answer: Callable[[Any], Awaitable[Any]]) -> None:
    """The worker's side: answers every line of stdin until it ends."""
    loop = asyncio.get_running_loop()
    with os.fdopen(int(os.environ[ANSWER_FD_VARIABLE]), "w") as answers:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await answer(json.loads(line))), file=answers, flush=True)
