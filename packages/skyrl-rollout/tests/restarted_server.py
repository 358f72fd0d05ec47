"""A reference server at one url for as long as a test lasts, in one process after another."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Self

from held import Life
from skyrl_rollout.reference.process import ReferenceServer


class RestartedServer:
    """`with RestartedServer("a", *flags) as server:` starts it. process: the one that serves now; life: what was seen
    of it; ended_lives: what was seen of those before."""

    def __init__(self, name: str, *flags: str) -> None:
        self.name, self._flags = name, flags
        self._listen = f"127.0.0.1:{_free_port()}"
        self.ended_lives: list[Life] = []

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.stop()

    @property
    def url(self) -> str:
        return f"grpc://{self._listen}"

    @property
    def instance_id(self) -> str:
        """Of the process; "" before it is ready."""
        return self.process.ready.get("instance", "")

    def _start(self) -> None:
        self.process = ReferenceServer(*self._flags, listen=self._listen)
        self.process.__enter__()
        self.life = Life(self.process.pid)

    async def _restart(self, away_s: float) -> None:
        self.ended_lives.append(self.life)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(self._start)

    async def kill(self, away_s: float) -> None:
        """SIGKILL, and `away_s` later another process."""
        await asyncio.to_thread(self.process.kill)
        await self._restart(away_s)

    async def terminate(self, away_s: float) -> None:
        """SIGTERM, and `away_s` after its end another process."""
        code = await asyncio.to_thread(self.process.stop)
        assert code == 0, f"{self.name} ended with {code}:\n{self.process.last_lines()}"
        await self._restart(away_s)

    async def stop(self, away_s: float) -> None:
        """SIGSTOP, and `away_s` later SIGCONT."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(away_s)
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


ABSENCES: dict[str, Callable[[RestartedServer, float], Awaitable[None]]] = {
    "kill": RestartedServer.kill,
    "stop": RestartedServer.stop,
    "terminate": RestartedServer.terminate,
}


def _free_port() -> int:
    """Outside the range of outgoing connections, so that none takes it while the server is away."""
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
