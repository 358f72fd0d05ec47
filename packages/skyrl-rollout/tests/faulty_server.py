"""A server that misbehaves: `python faulty_server.py FAULT [--listen ADDR] [--vocab-size N]`, then the fault."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterator

from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.server import ServerOptions, serve, swapping
from skyrl_rollout.server.engine import Adapter, EngineRequest, SampleEnded, TokensMade
from skyrl_rollout.weights.manifest import TensorLayout

SLOWLY_S = 1.0


class FailsToLoad(ReferenceEngine):
    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        next(tensors)
        raise RuntimeError("the worker died half way")


class LoadsSlowly(ReferenceEngine):
    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        await asyncio.sleep(SLOWLY_S)
        await super().load_weights(tensors)


class SealsSlowly(ReferenceEngine):
    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        verify = swapping.verify

        def slowly(*given: object) -> None:
            time.sleep(SLOWLY_S)  # in the thread that verifies
            verify(*given)  # type: ignore[arg-type]

        swapping.verify = slowly


class FailsOnAdapters(ReferenceEngine):
    async def load_adapter(self, adapter: Adapter, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        if adapter.version > 1:
            raise RuntimeError("the adapter broke")
        await super().load_adapter(adapter, tensors)


class FailsToSleep(ReferenceEngine):
    async def sleep(self, level: str) -> int:
        raise RuntimeError("no room on the host")


class Raises(ReferenceEngine):
    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokensMade | SampleEnded]:
        async for item in super().generate(request):
            yield item
            raise RuntimeError("the worker died")


class EndsSilently(ReferenceEngine):
    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokensMade | SampleEnded]:
        async for item in super().generate(request):
            if isinstance(item, SampleEnded):
                return
            yield item


class Refuses(ReferenceEngine):
    def check(self, request: EngineRequest) -> None:
        raise ValueError("min_p does not combine with drafts here: leave it 0")


class Wedges(ReferenceEngine):
    async def _step(self) -> None:
        if self._steps > 5:
            await asyncio.sleep(1000)
        await super()._step()


class NeverAborts(ReferenceEngine):
    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(1000)


class NeedsRoom(ReferenceEngine):
    def extra_nbytes(self, nbytes: int) -> int:
        assert nbytes == sum(t.nbytes for t in self.identity.tensors)
        return 1 << 50


class NeverSteps(ReferenceEngine):
    async def _run(self) -> None:
        await asyncio.sleep(1000)


class DoesNotStart(ReferenceEngine):
    def __init__(self, **fields: object) -> None:
        raise OSError("there is no model here")


FAULTS = {
    cls.__name__: cls
    for cls in (
        FailsToLoad, LoadsSlowly, SealsSlowly, FailsOnAdapters, FailsToSleep, Raises, EndsSilently, Refuses, Wedges,
        NeverAborts, NeedsRoom, NeverSteps, DoesNotStart,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--vocab-size", type=int, default=64)
    args = parser.parse_args()

    async def build() -> ReferenceEngine:
        return FAULTS[args.fault](canary=True, vocab_size=args.vocab_size, token_delay_s=0.005)

    return asyncio.run(serve(build, ServerOptions(args.listen, wedged_after_s=0.5, drain_grace_s=1)))


if __name__ == "__main__":
    sys.exit(main())
