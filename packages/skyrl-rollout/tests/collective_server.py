"""A server process whose engine receives weights by itself: `python collective_server.py ENGINE`, then a ready line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
from raw_updates import Draft
from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.server import ServerOptions, serve
from skyrl_rollout.server.engine import CollectiveTransfer
from skyrl_rollout.weights.manifest import TensorLayout

VOCAB = 64
TIMEOUT_S = 5.0


class Collecting(ReferenceEngine):
    """Joins at once. What it receives forces the token that the first byte of the first handle names, else 37."""

    def __init__(self) -> None:
        super().__init__(canary=True, token_delay_s=0.002)
        self.capabilities = replace(self.capabilities, collectives=("gloo", "cuda_ipc"))
        self.transfer: CollectiveTransfer | None = None

    async def join(self, transfer: CollectiveTransfer, tensors: Sequence[TensorLayout]) -> None:
        if self.transfer is not None:
            raise RuntimeError("the last group was not left")
        self.transfer, self.tensors = transfer, tensors

    async def receive(self) -> None:
        assert self.transfer is not None
        handles = self.transfer.handles
        token = min(handles.items())[1][1][0] if handles else 37
        canary = np.zeros(VOCAB, "<f4")
        canary[token] = 1000.0
        await self.load_weights(iter([(t, memoryview(canary.tobytes())) for t in self.tensors[:1]]))

    async def leave(self) -> None:
        self.transfer = None


class NeverJoins(Collecting):
    async def join(self, transfer: CollectiveTransfer, tensors: Sequence[TensorLayout]) -> None:
        await super().join(transfer, tensors)
        await asyncio.Event().wait()


class CannotJoin(Collecting):
    async def join(self, transfer: CollectiveTransfer, tensors: Sequence[TensorLayout]) -> None:
        await super().join(transfer, tensors)
        raise RuntimeError(f"no route to {transfer.master_addr}")


class NeverReceives(Collecting):
    async def receive(self) -> None:
        await asyncio.Event().wait()


class Gloo(Collecting):
    """Receives one broadcast per tensor, in the manifest's order, from rank 0 of a gloo group."""

    async def join(self, transfer: CollectiveTransfer, tensors: Sequence[TensorLayout]) -> None:
        await super().join(transfer, tensors)
        self._group = await asyncio.to_thread(gloo_group, transfer, transfer.rank_offset)

    async def receive(self) -> None:
        data = await asyncio.to_thread(self._received)
        await self.load_weights(iter([(t, memoryview(d)) for t, d in zip(self.tensors, data, strict=True)]))

    def _received(self) -> list[bytes]:
        import torch

        buffers = [torch.empty(t.nbytes, dtype=torch.uint8) for t in self.tensors]
        for buffer in buffers:
            self._group.broadcast(buffer, root=0).wait()
        return [b.numpy().tobytes() for b in buffers]


def gloo_group(transfer: CollectiveTransfer, rank: int) -> Any:
    """The group of one rank; rank 0 listens. Raises RuntimeError when the others do not come."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(transfer.master_addr, transfer.master_port, transfer.world_size, rank == 0, timeout)
    return ProcessGroupGloo(PrefixStore("weights", store), rank, transfer.world_size, timeout)


def broadcast(group: Any, d: Draft) -> None:
    """Sends every tensor from rank 0, in the manifest's order."""
    import torch

    for t in d.manifest.tensors:
        group.broadcast(torch.frombuffer(d.shard, dtype=torch.uint8, count=t.nbytes, offset=t.offset), root=0).wait()


ENGINES = {cls.__name__: cls for cls in (Collecting, NeverJoins, CannotJoin, NeverReceives, Gloo)}


def main() -> int:
    async def build() -> ReferenceEngine:
        return ENGINES[sys.argv[1]]()

    return asyncio.run(serve(build, ServerOptions("127.0.0.1:0", drain_grace_s=1)))


if __name__ == "__main__":
    sys.exit(main())
