"""How much of a prompt was read before under the same cache key: bookkeeping of prompt blocks, without any KV."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import xxhash

BLOCK_TOKENS = 16
MAX_BLOCKS = 65_536


class PrefixCache:
    """The most recently used prompt blocks. A block is known by its tokens, all tokens before it and the cache key."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, cache_key: str, prompt: np.ndarray) -> int:
        """How many tokens of int32 [P] lie in leading whole blocks that are there; from now on all its blocks are."""
        data, digest = prompt.tobytes(), xxhash.xxh3_128_digest(cache_key.encode())
        block_bytes, cached, all_there = BLOCK_TOKENS * prompt.itemsize, 0, True
        for start in range(0, len(data) - block_bytes + 1, block_bytes):
            digest = xxhash.xxh3_128_digest(digest + data[start : start + block_bytes])
            all_there = all_there and digest in self._blocks
            cached += BLOCK_TOKENS * all_there
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return cached

    def drop(self) -> int:
        """Forgets everything; returns how many blocks that were."""
        count = len(self._blocks)
        self._blocks.clear()
        return count
