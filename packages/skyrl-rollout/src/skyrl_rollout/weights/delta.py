"""What changed in a tensor since the last publish, as places and values; applying it twice is harmless; pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from skyrl_rollout.weights.arena import Arena, flat
from skyrl_rollout.weights.manifest import ITEM_BYTES, Manifest, TensorLayout
from skyrl_rollout.weights.update import Cargo

INDEX_DTYPE = np.dtype("<i4")
MAX_ELEMENTS = 1 << 31  # what an index can name
_BLOCK_BYTES = 8 << 20


def changed(old: memoryview, new: memoryview, dtype: str) -> bytes:
    """n ascending little-endian int32 element indices and then the n new elements, as they lie; b"" where nothing
    changed. old, new: the flat bytes of one tensor of `dtype`. Elements are compared bit by bit, so NaN equals itself.

    Raises ValueError for lengths that differ and for more elements than an index can name.
    """
    size = ITEM_BYTES[dtype]
    if len(old) != len(new):
        raise ValueError(f"{len(old)} old bytes cannot be compared with {len(new)} new ones")
    if len(new) // size >= MAX_ELEMENTS:
        raise ValueError(f"a tensor of {len(new) // size} elements cannot be sent as a delta: indices have 31 bits")
    kind = np.dtype(f"<u{size}")
    a, b = np.frombuffer(old, kind), np.frombuffer(new, kind)
    block = _BLOCK_BYTES // size
    parts = [np.flatnonzero(a[i : i + block] != b[i : i + block]) + i for i in range(0, len(a), block)]
    index = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return index.astype(INDEX_DTYPE).tobytes() + b[index].tobytes()


class DeltaDraft:
    """What changes against the bytes of `arena` while it is written over: `note` each tensor before it is written."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._changes: dict[str, bytes] = {}
        self._nbytes, self._limit = 0, arena.nbytes // 2

    @property
    def is_worth_it(self) -> bool:
        """Whether it is smaller than half of all, and not nothing: an update needs a tensor."""
        return 0 < self._nbytes <= self._limit

    def note(self, name: str, data: memoryview) -> None:
        """Raises ValueError for a tensor that is not in the arena's layout, came before, or has another length."""
        spec, new = self._arena.slot(name), flat(name, data)
        if self._nbytes > self._limit:
            return  # it is sent in full: no need to look further
        if len(new) != spec.nbytes:
            raise ValueError(f"tensor {name}: {len(new)} bytes came, {spec.nbytes} were announced")
        if spec.nbytes // ITEM_BYTES[spec.layout.dtype] >= MAX_ELEMENTS:
            self._nbytes = self._limit + 1
            return
        if change := changed(self._arena.view(spec), new, spec.layout.dtype):
            self._changes[name] = change
            self._nbytes += len(change)

    def cargo(self, target_version: int, base_version: int) -> Cargo:
        """The changes in an arena of their own, under the digests of the whole new tensors."""
        whole = {spec.layout.name: spec for spec in self._arena.specs()}
        layout = [TensorLayout(name, "u8", (len(change),)) for name, change in self._changes.items()]
        arena = Arena(layout, shared=self._arena.shared)
        for name, change in self._changes.items():
            arena.write(name, memoryview(change))
        specs = tuple(
            replace(
                spec,
                layout=whole[spec.layout.name].layout,
                content_digest=whole[spec.layout.name].content_digest,
                sent_nbytes=spec.nbytes,
            )
            for spec in arena.specs()
        )
        return Cargo(Manifest(target_version, specs, base_version=base_version), arena)
