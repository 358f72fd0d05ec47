"""Where the bytes of an update wait until its commit: memory of the server's own, or the trainer's shared memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from skyrl_rollout.errors import CorruptBytes, InvalidRequest, OffsetHole, StagingFull, WrongState
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, TensorSpec, content_digest
from skyrl_rollout.weights.shm import map_segment

MEMORY_RESERVE_BYTES = 64 << 20  # what the rest of the server may need while an update waits


class Staging(Protocol):
    """Bytes of one update by shard."""

    @property
    def durable(self) -> dict[int, int]:
        """shard -> bytes that need not be sent again."""

    def view(self, spec: TensorSpec) -> memoryview: ...

    def discard(self, shard: int) -> None:
        """The shard must be sent again."""

    def close(self) -> None: ...


class InlineStaging:
    """Private memory of the manifest's size, filled in order by chunks."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises StagingFull when the machine has too little memory left."""
        self._sizes = manifest.shard_nbytes()
        need, free = sum(self._sizes.values()), available_memory()
        if need + MEMORY_RESERVE_BYTES > free:
            raise StagingFull(
                f"the update needs {need / 1e6:.0f} MB to be staged and this machine has {free / 1e6:.0f} MB left: "
                f"free memory, or publish through shared memory on one host"
            )
        self._maps = {shard: mmap.mmap(-1, max(size, 1)) for shard, size in self._sizes.items()}
        self.durable = dict.fromkeys(self._sizes, 0)

    def write(self, shard: int, offset: int, data: bytes | memoryview) -> int:
        """Appends a chunk and returns the shard's durable offset; a chunk that is there already is ignored.

        Raises InvalidRequest for an unknown shard, an overlap or bytes beyond the shard, OffsetHole for a gap.
        """
        if shard not in self._sizes:
            raise InvalidRequest(f"shard {shard} is not in the manifest: it has shards {sorted(self._sizes)}")
        have, end = self.durable[shard], offset + len(data)
        if end > self._sizes[shard]:
            raise InvalidRequest(f"shard {shard} has {self._sizes[shard]} bytes, the chunk ends at {end}")
        if end <= have:
            return have
        if offset < have:
            raise InvalidRequest(f"the chunk at {offset} of shard {shard} overlaps the {have} bytes received")
        if offset > have:
            raise OffsetHole(
                f"the chunk of shard {shard} starts at {offset}, only {have} bytes arrived: send from there",
                details={"durable_offset": str(have), "shard": str(shard)},
            )
        self._maps[shard][offset:end] = data
        self.durable[shard] = end
        return end

    def view(self, spec: TensorSpec) -> memoryview:
        return memoryview(self._maps[spec.shard])[spec.offset : spec.offset + spec.layout.nbytes]

    def discard(self, shard: int) -> None:
        self.durable[shard] = 0

    def close(self) -> None:
        _close(self._maps)


class ShmStaging:
    """The trainer's segments, mapped read-only until the commit: no copy of our own."""

    def __init__(self, manifest: Manifest, segments: dict[int, str]) -> None:
        self._sizes, self._segments = manifest.shard_nbytes(), segments
        missing = sorted(set(self._sizes) - set(segments))
        if missing:
            raise InvalidRequest(f"transport.shm names no segment for shards {missing}")
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def durable(self) -> dict[int, int]:
        return {shard: size if shard in self._maps else 0 for shard, size in self._sizes.items()}

    def pull(self) -> None:
        """Maps every segment. Raises InvalidRequest for a name, kind or size of file that is refused."""
        for shard, size in self._sizes.items():
            if shard not in self._maps and size:
                try:
                    self._maps[shard] = map_segment(self._segments[shard], size)
                except FileNotFoundError as error:
                    raise WrongState(str(error)) from error
                except ValueError as error:
                    raise InvalidRequest(str(error)) from error

    def view(self, spec: TensorSpec) -> memoryview:
        if not spec.layout.nbytes:
            return memoryview(b"")
        return memoryview(self._maps[spec.shard])[spec.offset : spec.offset + spec.layout.nbytes]

    def discard(self, shard: int) -> None:
        if shard in self._maps:
            _close({shard: self._maps.pop(shard)})

    def close(self) -> None:
        _close(self._maps)


def missing_bytes(staging: Staging, manifest: Manifest) -> dict[int, int]:
    """shard -> bytes that have not arrived; empty when all are there."""
    durable = staging.durable
    return {shard: size - durable[shard] for shard, size in manifest.shard_nbytes().items() if durable[shard] < size}


def verify(staging: Staging, manifest: Manifest) -> None:
    """Raises CorruptBytes naming the tensors whose bytes are not those promised. Slow: run it in a thread."""
    wrong = [t for t in manifest.tensors if content_digest(staging.view(t)) != t.content_digest]
    if wrong:
        names = ", ".join(t.layout.name for t in wrong[:5])
        raise CorruptBytes(
            f"{len(wrong)} tensors do not have the bytes that the manifest promised: {names}; send their shards again",
            details={"shards": ",".join(map(str, sorted({t.shard for t in wrong})))},
        )


def tensors(staging: Staging, manifest: Manifest) -> Iterator[tuple[TensorLayout, memoryview]]:
    """Layout and bytes of every tensor, in the manifest's order."""
    for spec in manifest.tensors:
        yield spec.layout, staging.view(spec)


def available_memory() -> int:
    """Bytes that can be taken without swapping, by the machine and by the container's limit."""
    try:
        free = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    except (OSError, StopIteration):
        return sys.maxsize  # no such file on this system: the allocation itself will tell
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        reclaimable = _field(Path("/sys/fs/cgroup/memory.stat"), "inactive_file")
    except (OSError, StopIteration):
        return free
    return free if limit == "max" else min(free, int(limit) - used + reclaimable)


def _field(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name)


def _close(maps: dict[int, mmap.mmap]) -> None:
    for shard in list(maps):
        try:
            maps.pop(shard).close()
        except BufferError:  # the engine still holds a view; the pages go when it does
            pass
