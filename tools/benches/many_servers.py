"""Many reference servers in one process, each with a socket of its own, for `benches.scale`.

python many_servers.py COUNT          # prints one `ready url=...` line per server
"""

import asyncio
import os
import sys

from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.server import ServerOptions, serve

MAX_RUNNING = 8192


async def build() -> ReferenceEngine:
    """An engine whose tokens cost next to nothing."""
    return ReferenceEngine(max_running=MAX_RUNNING)


async def run(count: int) -> None:
    """Serves until the first of them is told to stop."""
    options = ServerOptions(listen="127.0.0.1:0", max_concurrent=MAX_RUNNING)
    servers = [asyncio.create_task(serve(build, options)) for _ in range(count)]
    await asyncio.wait(servers, return_when=asyncio.FIRST_COMPLETED)


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1])))
    os._exit(0)
