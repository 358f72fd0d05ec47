"""The bytes of one update, laid out once and reused: tensors stream in, their digests are taken on the copy."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from skyrl_rollout.weights.manifest import ALIGNMENT_BYTES, TensorLayout, TensorSpec, place
from skyrl_rollout.weights.shm import Segment

SHARD_BYTES = 256 << 20  # a shard is full at that; more shards are what a server may take side by side
_BLOCK_BYTES = 1 << 20  # copied and digested while it is in the cache


class Arena:
    """Room for the tensors of `layout` in one or more shards, in shared memory (`segments` has their names) or private.

    The same arena serves every publish of the same layout: its pages are touched once. What was written stays until
    `begin`, so that a replica that missed an update can be given it later.
    """

    def __init__(self, layout: Sequence[TensorLayout], *, shared: bool, shard_bytes: int = SHARD_BYTES) -> None:
        """Raises MemoryError, saying what is needed, when shared memory is too small; ValueError for a name twice."""
        self.layout, self.shared = tuple(layout), shared
        self._specs = _placed(self.layout, shard_bytes)
        self._index = {t.name: i for i, t in enumerate(self.layout)}
        if len(self._index) != len(self.layout):
            raise ValueError("the layout names a tensor twice")
        self.shard_nbytes: dict[int, int] = {0: 0}
        for s in self._specs:
            self.shard_nbytes[s.shard] = s.offset + s.nbytes
        self.segments: dict[int, Segment] = {}
        self._maps: dict[int, mmap.mmap] = {}
        try:
            for shard, nbytes in self.shard_nbytes.items():
                if shared:
                    self.segments[shard] = Segment(nbytes)
                self._maps[shard] = self.segments[shard].buffer if shared else mmap.mmap(-1, max(nbytes, 1))
        except MemoryError:
            for segment in self.segments.values():
                segment.close()
            raise
        self.buffers = {shard: memoryview(m)[: self.shard_nbytes[shard]] for shard, m in self._maps.items()}
        self._filled: dict[str, TensorSpec] = {}

    @property
    def nbytes(self) -> int:
        return sum(self.shard_nbytes.values())

    def fits(self, layout: Sequence[TensorLayout], *, shared: bool) -> bool:
        return self.layout == tuple(layout) and self.shared == shared

    def begin(self) -> None:
        """Forgets what was written; every tensor has to come again."""
        self._filled.clear()

    def write(self, name: str, data: memoryview) -> None:
        """Copies one tensor's bytes to its place; may run in a thread, for it lets others run meanwhile. Raises
        ValueError for a name that is not in the layout or came before, and for a wrong length."""
        spec, source = self.slot(name), flat(name, data)
        if len(source) != spec.nbytes:
            raise ValueError(
                f"tensor {name}: {len(source)} bytes came, its layout {_form(spec.layout)} is {spec.nbytes}"
            )
        digest, ours, theirs = (
            xxhash.xxh3_128(),
            np.frombuffer(self.view(spec), np.uint8),
            np.frombuffer(source, np.uint8),
        )
        for start in range(0, spec.nbytes, _BLOCK_BYTES):
            block = ours[start : start + _BLOCK_BYTES]
            np.copyto(block, theirs[start : start + _BLOCK_BYTES])
            digest.update(block.data)
        self._filled[name] = replace(spec, content_digest=digest.digest())

    def slot(self, name: str) -> TensorSpec:
        """Where a tensor that is still to come lies. Raises ValueError for a wrong name, or one that came before."""
        if name not in self._index:
            raise ValueError(f"tensor {name} is not in the layout of {len(self.layout)} tensors that was announced")
        if name in self._filled:
            raise ValueError(f"tensor {name} came twice")
        return self._specs[self._index[name]]

    def view(self, spec: TensorSpec) -> memoryview:
        """The bytes at a tensor's place."""
        return self.buffers[spec.shard][spec.offset : spec.offset + spec.nbytes]

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor with its digest, in layout order. Raises ValueError naming those that never came."""
        missing = [t.name for t in self.layout if t.name not in self._filled]
        if missing:
            shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            raise ValueError(f"{len(missing)} of {len(self.layout)} tensors never came: {shown}")
        return tuple(self._filled[t.name] for t in self.layout)

    def chunks(self, shard: int, start: int, chunk_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) from `start` to the end of a shard, dense."""
        buffer = self.buffers[shard]
        for offset in range(start, len(buffer), chunk_bytes):
            yield offset, buffer[offset : min(offset + chunk_bytes, len(buffer))]

    def close(self) -> None:
        """Gives the memory back; the names of shared segments go with it."""
        for buffer in self.buffers.values():
            with contextlib.suppress(BufferError):  # a copy that was called off may still hold a view of it
                buffer.release()
        for segment in self.segments.values():
            segment.close()
        for mapped in self._maps.values() if not self.shared else ():
            with contextlib.suppress(BufferError):  # someone still holds a view; the pages go when it does
                mapped.close()


def flat(name: str, data: memoryview) -> memoryview:
    """A tensor's bytes as they lie. Raises ValueError where they are not contiguous."""
    if not data.c_contiguous:
        raise ValueError(f"tensor {name}: its bytes are not contiguous; make it so before it is sent")
    if data.nbytes == 0:
        return memoryview(b"")
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")


def _placed(layout: Sequence[TensorLayout], shard_bytes: int) -> tuple[TensorSpec, ...]:
    """Whole tensors one after another; a shard that has reached `shard_bytes` is followed by another."""
    shards: list[list[TensorLayout]] = [[]]
    nbytes = 0
    for t in layout:
        if nbytes >= shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(t)
        nbytes += -(-t.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(spec for shard, tensors in enumerate(shards) for spec in place(tensors, shard=shard))


def _form(layout: TensorLayout) -> str:
    return f"{list(layout.shape)} of {layout.dtype}"
