"""What one client process pays for thousands of generations at the same time, on 1 to 64 servers.

The servers share one process; every one of them has a socket and the client a connection to each. Tokens come slowly,
so that all streams are open together, and at the end of each sample in one message, as a trainer asks for them.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benches.report import Figure, Report, versions_here
from benches.worker import Worker

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Size:
    """Streams at the same time, tokens of each, seconds between two of them, and the points of the curve."""

    streams: int = 4096
    tokens: int = 4
    token_delay_s: float = 10.0
    servers: tuple[int, ...] = (1, 4, 16, 64)


async def measure(small: bool) -> Report:
    """CPU per finished sample and memory per open stream, for every number of servers."""
    size = Size(streams=32, tokens=3, token_delay_s=0.5, servers=(1, 2)) if small else Size()
    figures: list[Figure] = []
    for count in size.servers:
        figures += await measure_servers(count, size)
    return Report("scale", figures, asdict(size), not small, versions_here())


async def measure_servers(count: int, size: Size) -> list[Figure]:
    """A point of the curve: new servers, a new client process, one wave of everything."""
    wave = {"streams": size.streams, "tokens": size.tokens, "token_delay_s": size.token_delay_s}
    with servers(count) as urls:
        async with Worker("benches.scale_client", *urls) as client:
            found = await client.ask(wave)
    name = f"{count} server" + ("s" if count > 1 else "")
    return [
        Figure(f"{name}: streams open together", found["open_streams"], "", at_least=size.streams),
        Figure(f"{name}: client CPU per finished sample", found["cpu_s"] / found["samples"] * 1e3, "ms"),
        Figure(f"{name}: client memory per open stream", found["opened_nbytes"] / found["open_streams"] / 1e3, "kB"),
        Figure(f"{name}: finished samples", found["samples"] / found["seconds"], "1/s"),
    ]


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[str]]:
    """`count` servers in one process that ends with the block, or with this process."""
    watched, parent_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "many_servers.py"), str(count)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SKYRL_PARENT_FD": str(watched)},
        pass_fds=[watched],
        start_new_session=True,
    )
    os.close(watched)
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            ready = [line for _ in range(count) for line in (lines.readline(),) if line.startswith("ready url=")]
            if len(ready) < count:
                raise RuntimeError(f"only {len(ready)} of {count} servers are ready, see above")
            yield [line.split()[1].removeprefix("url=") for line in ready]
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(parent_end)
