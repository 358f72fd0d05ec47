"""Which logits follow which four tokens: a pure function of a seed and, in canary mode, of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from skyrl_rollout.reference.model import to_float64
from skyrl_rollout.weights.manifest import TensorLayout

CONTEXT = 4
NO_TOKEN = -1  # stands for the tokens before a short prompt
TABLE = 1 << 16
SPREAD = 2.0  # logits lie in [-2 * SPREAD, 2 * SPREAD)
BIAS_LIMIT = 1e4

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 of uint64 values (Steele, Lea, Flood 2014): a bijection whose bits all look random."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(x: np.ndarray) -> np.ndarray:
    """uint64 -> float64 in [0, 1): the upper 53 bits of the mixed value."""
    return (mix(x) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class LogitTable:
    """logits(last 4 tokens) as the sum of two windows into two fixed tables, plus `bias`."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bias_V = np.zeros(vocab_size)
        self._seed = np.uint64(seed % 2**64)
        self.build()

    def build(self) -> None:
        """Makes the two tables, which the seed alone decides."""
        counters = np.arange(2 * (TABLE + self.vocab_size), dtype=np.uint64) + mix(np.array([self._seed]))
        table = (uniform(counters) * 2 - 1) * SPREAD
        windows = np.lib.stride_tricks.sliding_window_view
        half = TABLE + self.vocab_size
        self._first, self._second = windows(table[:half], self.vocab_size), windows(table[half:], self.vocab_size)

    def drop(self) -> int:
        """Gives the tables back and returns their bytes; there are no logits until `build`."""
        nothing = np.empty((0, 0))
        self._first, self._second = nothing, nothing
        return 2 * (TABLE + self.vocab_size) * np.dtype(np.float64).itemsize

    def logits(self, last_R4: np.ndarray) -> np.ndarray:
        """int64 [R, 4] -> float64 [R, V]."""
        key_R = np.full(len(last_R4), self._seed)
        for column in range(CONTEXT):
            key_R = mix(key_R ^ last_R4[:, column].astype(np.uint64))
        mask = np.uint64(TABLE - 1)
        out_RV = self._first[(key_R & mask).astype(np.int64)]
        out_RV += self._second[((key_R >> np.uint64(16)) & mask).astype(np.int64)]
        out_RV += self.bias_V
        return out_RV


def canary_tensor(tensors: Sequence[TensorLayout], vocab_size: int) -> TensorLayout:
    """The tensor whose bytes bias the logits: the first with at least a value per token, else the largest."""
    big = [t for t in tensors if np.prod(t.shape) >= vocab_size]
    return big[0] if big else max(tensors, key=lambda t: t.nbytes)


def canary_bias(layout: TensorLayout, data: memoryview, vocab_size: int) -> np.ndarray:
    """float64 [V]: value t of the tensor for token t, plus a jitter in [-1, 1) that depends on every one of its bytes.

    So a test forces token v by writing a large value at v, and a trainer's smallest step is visible in what is drawn.
    """
    values = to_float64(data, layout.dtype, vocab_size)
    bias_V = np.resize(values, vocab_size) if len(values) else np.zeros(vocab_size)
    bias_V = np.clip(np.nan_to_num(bias_V, nan=0.0), -BIAS_LIMIT, BIAS_LIMIT)
    seed = np.uint64(xxhash.xxh3_64_intdigest(data))
    return bias_V + (uniform(np.arange(vocab_size, dtype=np.uint64) ^ seed) * 2 - 1)


def has_nan(layout: TensorLayout, data: memoryview, vocab_size: int) -> bool:
    """Whether a canary's values make logits unknown: a real model would answer NaN logprobs and go on."""
    return bool(np.isnan(to_float64(data, layout.dtype, vocab_size)).any())
