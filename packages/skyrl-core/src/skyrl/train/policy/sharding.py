"""How a batch is cut: whole sequences over ranks, balanced by tokens, and over micro-batches, sorted by length."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroLimits:
    """How large a micro-batch may be: `max_sequences`, or `max_tokens` (rows x longest row) when that is above 0."""

    max_sequences: int
    max_tokens: int = -1


def balance(seq_lens_S: torch.Tensor, num_ranks: int) -> list[list[int]]:
    """One list of sequence indices per rank, ascending: longest first to the rank with the fewest tokens, ties to the
    lower rank. A rank may get none."""
    lens = seq_lens_S.tolist()
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for s in sorted(range(len(lens)), key=lambda s: (-lens[s], s)):
        load, rank = heapq.heappop(loads)
        shards[rank].append(s)
        heapq.heappush(loads, (load + lens[s], rank))
    return [sorted(shard) for shard in shards]


def micro_batches(seq_lens_S: torch.Tensor, limits: MicroLimits) -> list[list[int]]:
    """Indices per micro-batch, longest sequences first. A sequence longer than `max_tokens` stands alone."""
    lens = seq_lens_S.tolist()
    order = sorted(range(len(lens)), key=lambda s: (-lens[s], s))
    if limits.max_tokens <= 0:
        return [order[i : i + limits.max_sequences] for i in range(0, len(order), limits.max_sequences)]
    out: list[list[int]] = []
    for s in order:
        if out and (len(out[-1]) + 1) * lens[out[-1][0]] <= limits.max_tokens:
            out[-1].append(s)
        else:
            out.append([s])
    return out


def num_micro_batches(shard_lens: Sequence[torch.Tensor], limits: MicroLimits) -> int:
    """What every rank runs: the most that any shard needs, at least 1."""
    return max(1, *(len(micro_batches(lens_S, limits)) for lens_S in shard_lens))
