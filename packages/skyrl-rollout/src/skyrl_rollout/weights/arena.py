"""The bytes of one update, laid out once and reused: tensors stream in, their digests are taken on the copy."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import xxhash

from skyrl_rollout.weights.manifest import TensorLayout, TensorSpec, place
from skyrl_rollout.weights.shm import Segment

_BLOCK_BYTES = 1 << 20  # copied and digested while it is in the cache


class Arena:
    """Room for one shard of `layout`, in shared memory (`segment` has its name) or private (`segment` is None).

    The same arena serves every publish of the same layout: its pages are touched once.
    """

    def __init__(self, layout: Sequence[TensorLayout], *, shared: bool) -> None:
        """Raises MemoryError, saying what is needed, when shared memory is too small; ValueError for a name twice."""
        self.layout = tuple(layout)
        self._specs = place(self.layout)
        self._index = {t.name: i for i, t in enumerate(self.layout)}
        if len(self._index) != len(self.layout):
            raise ValueError("the layout names a tensor twice")
        self.nbytes = max((s.offset + s.layout.nbytes for s in self._specs), default=0)
        self.segment = Segment(self.nbytes) if shared else None
        self._map = self.segment.buffer if self.segment else mmap.mmap(-1, max(self.nbytes, 1))
        self.buffer = memoryview(self._map)[: self.nbytes]
        self._filled: dict[str, TensorSpec] = {}

    def fits(self, layout: Sequence[TensorLayout], *, shared: bool) -> bool:
        return self.layout == tuple(layout) and (self.segment is not None) == shared

    def begin(self) -> None:
        """Forgets what was written; every tensor has to come again."""
        self._filled.clear()

    def write(self, name: str, data: memoryview) -> None:
        """Copies one tensor's bytes to its place. Raises ValueError for a name that is not in the layout or came
        before, and for a wrong length."""
        if name not in self._index:
            raise ValueError(f"tensor {name} is not in the layout of {len(self.layout)} tensors that was announced")
        if name in self._filled:
            raise ValueError(f"tensor {name} came twice")
        spec = self._specs[self._index[name]]
        source, nbytes = _flat(name, data), spec.layout.nbytes
        if len(source) != nbytes:
            raise ValueError(f"tensor {name}: {len(source)} bytes came, its layout {_form(spec.layout)} is {nbytes}")
        target, digest = self.buffer[spec.offset : spec.offset + nbytes], xxhash.xxh3_128()
        for start in range(0, nbytes, _BLOCK_BYTES):
            block = target[start : start + _BLOCK_BYTES]
            block[:] = source[start : start + _BLOCK_BYTES]
            digest.update(block)
        self._filled[name] = replace(spec, content_digest=digest.digest())

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor with its digest, in layout order. Raises ValueError naming those that never came."""
        missing = [t.name for t in self.layout if t.name not in self._filled]
        if missing:
            shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            raise ValueError(f"{len(missing)} of {len(self.layout)} tensors never came: {shown}")
        return tuple(self._filled[t.name] for t in self.layout)

    def chunks(self, start: int, chunk_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) from `start` to the end of the shard, dense."""
        for offset in range(start, self.nbytes, chunk_bytes):
            yield offset, self.buffer[offset : min(offset + chunk_bytes, self.nbytes)]

    def close(self) -> None:
        """Gives the memory back; a shared segment's name goes with it."""
        self.buffer.release()
        if self.segment:
            self.segment.close()
            return
        with contextlib.suppress(BufferError):  # someone still holds a view; the pages go when it does
            self._map.close()


def _flat(name: str, data: memoryview) -> memoryview:
    if not data.c_contiguous:
        raise ValueError(f"tensor {name}: its bytes are not contiguous; make it so before it is sent")
    if data.nbytes == 0:
        return memoryview(b"")
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")


def _form(layout: TensorLayout) -> str:
    return f"{list(layout.shape)} of {layout.dtype}"
