"""Where new weights lie while the engine's processes read them: anonymous memory that they open by path.

No tensor is pickled, nothing appears under /dev/shm, and the kernel frees the memory with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_rollout.weights.manifest import ALIGNMENT_BYTES, TensorLayout

GROWTH_BYTES = 2 << 20


@dataclass(frozen=True)
class StagedTensor:
    """A tensor's layout and where it starts in the staged bytes."""

    layout: TensorLayout
    offset: int

    def as_row(self) -> tuple[str, str, list[int], int]:
        """(name, dtype, shape, offset): plain values, which is all that goes to the engine's processes."""
        return self.layout.name, self.layout.dtype, list(self.layout.shape), self.offset


class StagedBytes:
    """One reused block of memory; it grows to the largest update and its pages are touched once."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("skyrl-staged-weights", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._nbytes = self._touched = 0

    @property
    def path(self) -> str:
        """A path under which processes of the same user can open the bytes while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def missing(self, nbytes: int) -> int:
        """How much memory `fill` of so many bytes takes beyond what it has: pages that were never written take none."""
        return max(0, nbytes - self._touched)

    def fill(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> list[StagedTensor]:
        """Copies every tensor to its place; blocks, so call it in a thread. Raises MemoryError when memory is short."""
        staged: list[StagedTensor] = []
        end = 0
        for layout, data in tensors:
            self._grow(end + layout.nbytes)
            assert self._map is not None
            source = data.cast("B") if data.nbytes else memoryview(b"")
            self._map[end : end + layout.nbytes] = source
            self._touched = max(self._touched, end + layout.nbytes)
            staged.append(StagedTensor(layout, end))
            end += -(-layout.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return staged

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self._fd)

    def _grow(self, nbytes: int) -> None:
        if nbytes <= self._nbytes and self._map is not None:
            return
        size = -(-max(nbytes, 2 * self._nbytes, GROWTH_BYTES) // GROWTH_BYTES) * GROWTH_BYTES
        try:
            os.ftruncate(self._fd, size)
            if self._map is None:
                self._map = mmap.mmap(self._fd, size)
            else:
                self._map.resize(size)
        except OSError as error:
            raise MemoryError(f"{size / 1e6:.0f} MB to stage new weights cannot be taken: {error.strerror}") from None
        self._nbytes = size
