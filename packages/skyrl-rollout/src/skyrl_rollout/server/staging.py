"""Where the bytes of an update wait until its commit: memory of the server's own, or the trainer's shared memory."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol, TypeVar

from skyrl_rollout.errors import CorruptBytes, InvalidRequest, OffsetHole, WrongState
from skyrl_rollout.server.staging_memory import StagingMemory
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, TensorSpec, content_digest
from skyrl_rollout.weights.shm import map_segment

COPY_BLOCK_BYTES = 8 << 20  # between two of them a copy can be cancelled, and tells how far it is

_Source = TypeVar("_Source")
_Opened = TypeVar("_Opened")
OpenShard = Callable[[int, int], int]
"""(shard, nbytes) -> a file descriptor with at least so many bytes. Raises ValueError or FileNotFoundError."""


class Staging(Protocol):
    """Bytes of one update by shard."""

    @property
    def durable(self) -> dict[int, int]:
        """shard -> bytes that need not be sent again."""

    @property
    def releases_source(self) -> bool:
        """Whether the trainer's own bytes may go as soon as all are durable."""

    def view(self, spec: TensorSpec) -> memoryview: ...

    def pull(self) -> AsyncGenerator[None]:
        """Fetches what is missing, one step per item. Raises WrongState where bytes are sent instead, or where there is
        no source; InvalidRequest for one that is refused."""

    def discard(self, shard: int) -> None:
        """The shard must be sent again."""

    def close(self) -> None: ...


class OwnStaging:
    """Private memory of the manifest's size, which may outlive the update."""

    releases_source = True

    def __init__(self, manifest: Manifest, memory: StagingMemory, *, beside: int = 0) -> None:
        """beside: bytes that the engine will take too. Raises StagingFull when too little memory is left."""
        self._sizes, self._memory = manifest.shard_nbytes(), memory
        self._maps = memory.take(self._sizes, beside=beside)
        self.durable = dict.fromkeys(self._sizes, 0)

    def view(self, spec: TensorSpec) -> memoryview:
        return memoryview(self._maps[spec.shard])[spec.offset : spec.offset + spec.nbytes]

    def discard(self, shard: int) -> None:
        self.durable[shard] = 0

    def close(self) -> None:
        maps, self._maps = self._maps, {}
        if maps:
            self._memory.give_back(maps)


class InlineStaging(OwnStaging):
    """Filled in order by chunks."""

    def write(self, shard: int, offset: int, data: bytes | memoryview) -> int:
        """Appends a chunk and returns the shard's durable offset; a chunk that is there already is ignored.

        Raises InvalidRequest for an unknown shard, an overlap or bytes beyond the shard, OffsetHole for a gap.
        """
        if shard not in self._sizes:
            raise InvalidRequest(f"shard {shard} is not in the manifest: it has shards {sorted(self._sizes)[:20]}")
        have, end = self.durable[shard], offset + len(data)
        if end > self._sizes[shard]:
            raise InvalidRequest(
                f"shard {shard} has {self._sizes[shard]} bytes, the chunk ends at {end}: send its bytes only"
            )
        if end <= have:
            return have
        if offset < have:
            raise InvalidRequest(
                f"the chunk at {offset} of shard {shard} overlaps the {have} bytes received: send from there",
                details={"durable_offset": str(have), "shard": str(shard)},
            )
        if offset > have:
            raise OffsetHole(
                f"the chunk of shard {shard} starts at {offset}, only {have} bytes arrived: send from there",
                details={"durable_offset": str(have), "shard": str(shard)},
            )
        self._maps[shard][offset:end] = data
        self.durable[shard] = end
        return end

    async def pull(self) -> AsyncGenerator[None]:
        raise WrongState("the update was opened for inline bytes: call UploadChunks")
        yield


class CopiedStaging(OwnStaging):
    """Copied from files or segments of the trainer, by reads: a source that is cut short meanwhile is an error here,
    where a mapping would end the process."""

    def __init__(self, manifest: Manifest, memory: StagingMemory, open_shard: OpenShard, *, beside: int = 0) -> None:
        super().__init__(manifest, memory, beside=beside)
        self._open_shard = open_shard
        self._copying = asyncio.Lock()

    async def pull(self) -> AsyncGenerator[None]:
        async with self._copying:
            for shard, size in self._sizes.items():
                if self.durable[shard] == size:
                    continue
                fd = _opened(self._open_shard, shard, size)
                try:
                    while shard in self._maps and self.durable[shard] < size:
                        self.durable[shard] += await asyncio.to_thread(self._copy_block, fd, shard)
                        yield
                finally:
                    os.close(fd)

    def _copy_block(self, fd: int, shard: int) -> int:
        start = self.durable[shard]
        with memoryview(self._maps[shard]) as whole, whole[start : start + COPY_BLOCK_BYTES] as block:
            count = os.preadv(fd, [block], start)
        if not count:
            raise InvalidRequest(f"the source of shard {shard} ends at {start} of {self._sizes[shard]} bytes")
        return count


class MappedStaging:
    """The trainer's segments, mapped read-only until the commit: no copy of our own."""

    releases_source = False

    def __init__(self, manifest: Manifest, segments: dict[int, str]) -> None:
        self._sizes, self._segments = manifest.shard_nbytes(), segments
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def durable(self) -> dict[int, int]:
        return {shard: size if shard in self._maps else 0 for shard, size in self._sizes.items()}

    async def pull(self) -> AsyncGenerator[None]:
        for shard, size in self._sizes.items():
            if shard not in self._maps and size:
                self._maps[shard] = _opened(map_segment, self._segments[shard], size)
                yield

    def view(self, spec: TensorSpec) -> memoryview:
        if not spec.nbytes:
            return memoryview(b"")
        return memoryview(self._maps[spec.shard])[spec.offset : spec.offset + spec.nbytes]

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
    refuse_corrupt([t for t in manifest.tensors if content_digest(staging.view(t)) != t.content_digest])


def refuse_corrupt(wrong: list[TensorSpec]) -> None:
    """Raises CorruptBytes naming these tensors and their shards, if there are any."""
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


def _opened(open_source: Callable[[_Source, int], _Opened], source: _Source, nbytes: int) -> _Opened:
    try:
        return open_source(source, nbytes)
    except FileNotFoundError as error:
        raise WrongState(str(error)) from error
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _close(maps: dict[int, mmap.mmap]) -> None:
    for shard in list(maps):
        try:
            maps.pop(shard).close()
        except BufferError:  # somebody still holds a view; the pages go when it does
            pass
