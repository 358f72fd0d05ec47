"""Sums over sequences and groups of a flat batch."""

from __future__ import annotations

import torch


def segment_sum(values_T: torch.Tensor, ids_T: torch.Tensor, num_segments: int) -> torch.Tensor:
    """[num_segments]: the sum of the values that carry each id; 0 for an id that nobody carries."""
    out = torch.zeros(num_segments, dtype=values_T.dtype, device=values_T.device)
    return out.index_add(0, ids_T, values_T)


def dense_ids(ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(the same partition numbered 0..G-1, G)."""
    distinct, inverse = torch.unique(ids, return_inverse=True)
    return inverse, distinct.numel()
