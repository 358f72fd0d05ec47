"""Which seed goes on with a sample that another server began: the random stream as a counter that can be moved on."""

from __future__ import annotations

SEED_MASK = (1 << 63) - 1  # what the protocol takes as a seed
STRIDE = 0x5851F42D4C957F2D  # odd, so that no position comes twice


def continued_seed(seed: int, num_tokens: int) -> int:
    """The seed of a request that continues a sample of `seed` after `num_tokens` of its tokens.

    A server that draws token p from `continued_seed(seed, p)`, as the reference server does, makes the very tokens that
    the first server would have made. Any other engine draws from a stream of its own: there the continuation is as
    random as the sample was, and other tokens than without the move.
    """
    return (seed + num_tokens * STRIDE) & SEED_MASK
