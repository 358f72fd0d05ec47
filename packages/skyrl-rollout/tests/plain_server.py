"""A server process over an engine that only generates: `python plain_server.py` offers no capability beyond that."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.server import ServerOptions, serve
from skyrl_rollout.server.engine import EngineCapabilities, EngineRequest, PromptRead, SampleEnded, TokensMade
from skyrl_rollout.tokens import LogprobMode


class OnlyGenerates(ReferenceEngine):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities = EngineCapabilities((LogprobMode.RAW, LogprobMode.SAMPLING), ("abort",), ("recompute",))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded]:
        async for item in super().generate(request):
            if not isinstance(item, PromptRead):
                yield item


async def build() -> OnlyGenerates:
    return OnlyGenerates()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(build, ServerOptions("127.0.0.1:0"))))
