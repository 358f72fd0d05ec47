"""How a worker's tensors become the bytes that rollout servers receive: names, shapes, dtype, and one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from skyrl_rollout.weights.manifest import TensorLayout
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget, WeightPublisher

from skyrl.train.policy.contract import AdapterSpec
from skyrl.train.rollouts.adapters import ADAPTER_POLICY

R = TypeVar("R")

WIRE_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
TORCH_DTYPES = {name: dtype for dtype, name in WIRE_DTYPES.items()} | {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
CLOSE_TIMEOUT_S = 10.0


class Publisher:
    """Rank 0's side of publishing: keeps its arena and connections between updates, on a loop in a thread of its own,
    so that it may be called from a thread that has a running loop."""

    def __init__(self, transport: str = "auto", *, deltas: bool = False) -> None:
        """deltas: send only what changed since the last publish, to servers that offer it."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-publisher", daemon=True)
        self._thread.start()
        self._publisher = WeightPublisher(transport)
        self._deltas = deltas

    def publish(
        self,
        layout: Sequence[TensorLayout],
        tensors: Iterable[tuple[str, torch.Tensor]],
        targets: Sequence[PublishTarget],
        *,
        target_version: int,
        timeout_s: float,
    ) -> PublishReport:
        """Blocks until every target serves the weights, or raises what stopped it."""
        work = self._publisher.publish(
            layout,
            as_bytes(layout, tensors),
            targets,
            target_version=target_version,
            timeout_s=timeout_s,
            base_version=self._publisher.published_version if self._deltas else None,
        )
        return self._run(work)

    def publish_adapter(
        self,
        layout: Sequence[TensorLayout],
        tensors: Iterable[tuple[str, torch.Tensor]],
        targets: Sequence[PublishTarget],
        *,
        adapter: AdapterSpec,
        target_version: int,
        timeout_s: float,
    ) -> PublishReport:
        """Blocks until every target serves the adapter over its base weights, or raises what stopped it."""
        work = self._publisher.publish_adapter(
            ADAPTER_POLICY,
            layout,
            as_bytes(layout, tensors),
            targets,
            rank=adapter.rank,
            alpha=adapter.alpha,
            target_modules=target_modules(layout),
            target_version=target_version,
            timeout_s=timeout_s,
        )
        return self._run(work)

    def catch_up(self, targets: Sequence[PublishTarget], *, timeout_s: float) -> PublishReport:
        """Gives targets the weights that were published last, and the adapter over them; no tensor is exported again.
        May be called while another thread computes. Raises ValueError before the first publish, else what
        `WeightPublisher.catch_up` raises."""
        return self._run(self._publisher.catch_up(targets, timeout_s=timeout_s))

    def close(self) -> None:
        self._publisher.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def target_modules(layout: Iterable[TensorLayout]) -> tuple[str, ...]:
    """How the names of the adapted modules end ("q_proj"), of tensors named as PEFT saves them."""
    return tuple(sorted({t.name.split(".")[-3] for t in layout}))


def tensor_layouts(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorLayout, ...]:
    """Names and shapes in export order; float64, which no server holds, is announced as f32."""
    return tuple(TensorLayout(name, WIRE_DTYPES.get(t.dtype, "f32"), tuple(t.shape)) for name, t in tensors)


def cast_layouts(layout: Sequence[TensorLayout], dtype: str | None) -> tuple[TensorLayout, ...]:
    """The same tensors with every floating-point one in the server's dtype. ValueError for a dtype of no server."""
    if dtype is None:
        return tuple(layout)
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"a server asks for weights in {dtype!r}, expected one of {sorted(TORCH_DTYPES)}")
    name = WIRE_DTYPES[TORCH_DTYPES[dtype]]
    return tuple(
        TensorLayout(t.name, name if TORCH_DTYPES[t.dtype].is_floating_point else t.dtype, t.shape) for t in layout
    )


def as_bytes(
    layout: Sequence[TensorLayout], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, memoryview]]:
    """Each tensor cast to its layout's dtype, as contiguous bytes; one at a time."""
    dtypes = {t.name: TORCH_DTYPES[t.dtype] for t in layout}
    for name, tensor in tensors:
        flat = tensor.detach().to(dtypes[name]).contiguous().view(-1)
        yield name, flat.view(torch.uint8).numpy().data
