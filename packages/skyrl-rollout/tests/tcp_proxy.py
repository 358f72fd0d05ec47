"""A TCP proxy before a real server that cuts, silences, slows or refuses connections, or damages what they carry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

BLOCK_BYTES = 1 << 16


class TcpProxy:
    """`async with TcpProxy(server.url) as proxy:` forwards `proxy.url` to the server.

    cut(): ends every open connection. refusing: new connections end at once. silent: bytes are swallowed both ways.
    when_sent(text, action): calls action once, when a client sends `text` (gRPC sends a method's path in clear).
    bytes_per_s: how fast each connection is, each way; None is as fast as it goes. flip(pattern): changes one bit in
    the middle of the next `pattern` that comes by, whichever way it goes; num_flipped counts. add(data): bytes of the
    test's own go to the server on every connection.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("grpc://").rpartition(":")
        self._backend = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self._to_server: set[asyncio.StreamWriter] = set()
        self._triggers: dict[bytes, Callable[[], None]] = {}
        self.refusing = False
        self.silent = False
        self.deaf = False  # replies are swallowed, requests go through
        self.bytes_per_s: float | None = None
        self.connections = 0
        self.bytes_to_server = 0
        self.num_flipped = 0
        self._flips: list[bytes] = []

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"grpc://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def when_sent(self, text: str, action: Callable[[], None]) -> None:
        self._triggers[text.encode()] = action

    def add(self, data: bytes) -> None:
        for writer in self._to_server:
            writer.write(data)

    def flip(self, pattern: bytes, *, times: int = 1) -> None:
        self._flips += [pattern] * times

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refusing:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(*self._backend)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, back}
        self._writers |= pair
        self._to_server.add(back)
        with contextlib.suppress(asyncio.CancelledError):  # the test is over
            await asyncio.gather(self._pump(reader, back, to_server=True), self._pump(there, writer, to_server=False))
        self._writers -= pair
        self._to_server.discard(back)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while block := await reader.read(self._block_bytes()):
                if to_server:
                    self.bytes_to_server += len(block)
                    self._look_for_triggers(block)
                if self.silent or (self.deaf and not to_server):
                    continue
                writer.write(self._damaged(block) if self._flips else block)
                await writer.drain()
                if self.bytes_per_s is not None:
                    await asyncio.sleep(len(block) / self.bytes_per_s)
        writer.transport.abort()

    def _block_bytes(self) -> int:
        """What a slow connection carries in a fiftieth of a second, at most a block."""
        return BLOCK_BYTES if self.bytes_per_s is None else max(1, min(BLOCK_BYTES, int(self.bytes_per_s / 50)))

    def _damaged(self, block: bytes) -> bytes:
        pattern = self._flips[0]
        start = block.find(pattern)
        if start < 0:
            return block
        del self._flips[0]
        self.num_flipped += 1
        changed = bytearray(block)
        changed[start + len(pattern) // 2] ^= 1
        return bytes(changed)

    def _look_for_triggers(self, block: bytes) -> None:
        for text in [t for t in self._triggers if t in block]:
            self._triggers.pop(text)()
