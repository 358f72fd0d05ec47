"""Which random seed belongs to which part of a run: a hash of the run's seed and the names of the part."""

from __future__ import annotations

import xxhash

_SEED_BITS = 63


def derive(run_seed: int, *parts: int | str) -> int:
    """A seed in [0, 2**63) for one use, e.g. `derive(seed, step, "train", uid, turn)`.

    xxh3-64 over the typed, length-prefixed parts, so that ("1", 2), (1, "2") and ("12",) all differ. It depends on
    nothing else: the same arguments give the same seed on every machine and in every version of Python or numpy.
    """
    h = xxhash.xxh3_64()
    for part in (run_seed, *parts):
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a seed is derived from int and str parts only, got {part!r} ({type(part).__name__})")
        text = str(part).encode()
        h.update(f"{'i' if isinstance(part, int) else 's'}{len(text)}:".encode())
        h.update(text)
    return h.intdigest() >> (64 - _SEED_BITS)
