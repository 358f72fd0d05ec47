"""KV of rows that ended, kept for prompts that begin as they did: the next turn of a conversation, above all."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

SHORTEST = 16  # tokens; less is computed faster than found
MOST = 128  # prefixes; each new row looks at all of them


@dataclass
class Prefix:
    """token_ids: int32 [n]. copies: as `KvSlots.take` gives them."""

    token_ids: np.ndarray
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.copies)


class PrefixStore:
    """The most recently used prefixes within `limit_bytes`. Those of one salt are never seen under another."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._nbytes = 0
        self._kept: OrderedDict[tuple[str, bytes], Prefix] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(len(prefix.token_ids) for prefix in self._kept.values())

    def wants(self, num_tokens: int) -> bool:
        """Whether a prefix of so many tokens is worth an `add`."""
        return self._limit_bytes > 0 and num_tokens >= SHORTEST

    def add(self, salt: str, prefix: Prefix) -> None:
        """Keeps it, and forgets the least recently used ones. A row that goes on from a kept one takes its place."""
        if prefix.nbytes > self._limit_bytes:
            return
        self._drop((salt, prefix.token_ids.tobytes()))
        for key, old in list(self._kept.items()):
            if key[0] == salt and common(old.token_ids, prefix.token_ids) == len(old.token_ids):
                self._drop(key)
        self._kept[salt, prefix.token_ids.tobytes()] = prefix
        self._nbytes += prefix.nbytes
        while self._nbytes > self._limit_bytes or len(self._kept) > MOST:
            self._drop(next(iter(self._kept)))

    def find(self, salt: str, token_ids: np.ndarray) -> tuple[Prefix, int] | None:
        """The prefix with the longest common beginning, and how long that is."""
        best, longest = None, SHORTEST - 1
        for key, prefix in self._kept.items():
            if key[0] == salt and (length := common(prefix.token_ids, token_ids)) > longest:
                best, longest = key, length
        if best is None:
            return None
        self._kept.move_to_end(best)
        return self._kept[best], longest

    def clear(self) -> int:
        """Forgets all and returns how many tokens that were."""
        num_tokens, self._nbytes = self.num_tokens, 0
        self._kept.clear()
        return num_tokens

    def _drop(self, key: tuple[str, bytes]) -> None:
        old = self._kept.pop(key, None)
        self._nbytes -= old.nbytes if old is not None else 0


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
