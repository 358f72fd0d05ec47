"""How a token is drawn on a CPU: by one number between 0 and 1, which is looked up in the sums of the probabilities.

vLLM draws an exponential number for every token of the vocabulary, for seeded requests one row after the other: with 64
rows and 49,152 tokens that took 116 ms of a step of 385 ms where this takes 4. Whoever fails over needs seeds, so every
request through the seam has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BLOCK = 256
"""Tokens whose probabilities are summed at first; the sums inside of a block are only made where a token is drawn."""


def draw_once_per_row() -> None:
    """From here on vLLM's sampler draws by `drawn` on a CPU; on a GPU nothing changes."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_sampler

    if not current_platform.is_cpu():
        return

    def forward_cpu(self: Any, logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        shown = None
        if self.logprobs_mode == "processed_logits":
            shown = logits
        elif self.logprobs_mode == "processed_logprobs":
            shown = logits.log_softmax(dim=-1, dtype=torch.float32)
        return drawn(logits.softmax(dim=-1, dtype=torch.float32), generators), shown

    topk_topp_sampler.TopKTopPSampler.forward_cpu = forward_cpu


def drawn(probabilities_BV: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """One token per row, int64 [B]; a row without a generator draws from torch's own. Each takes one number."""
    uniform_B = torch.rand(len(probabilities_BV), dtype=torch.float64)
    for row, generator in generators.items():
        uniform_B[row].uniform_(generator=generator)
    return looked_up(probabilities_BV, uniform_B)


def looked_up(probabilities_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token of each row up to which the probabilities sum to more than `uniform_B` (float64 in [0, 1)) of the
    whole: inversion of the distribution function, in float64. A token of probability 0 is never one."""
    rows, vocabulary = probabilities_BV.shape
    if vocabulary <= BLOCK:
        ends = probabilities_BV.cumsum(-1, dtype=torch.float64)
        return _first_above(ends, uniform_B[:, None] * ends[:, -1:]).view(rows)
    even = vocabulary - vocabulary % BLOCK
    sums = [probabilities_BV[:, :even].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)]
    if even < vocabulary:
        sums.append(probabilities_BV[:, even:].sum(-1, keepdim=True, dtype=torch.float64))
    ends = torch.cat(sums, dim=1).cumsum(-1)
    target = uniform_B[:, None] * ends[:, -1:]
    block = _first_above(ends, target)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    token = block * BLOCK + torch.arange(BLOCK)
    inside = probabilities_BV.gather(1, token.clamp_max(vocabulary - 1)).double().masked_fill(token >= vocabulary, 0.0)
    place = _first_above(inside.cumsum(-1), target - before)
    return (block * BLOCK + place).clamp_max(vocabulary - 1).view(rows)


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index [B, 1] of the first entry over `target`. Rounding may leave the target just outside: it is moved inside,
    where the entry that is found is larger than the one before it. A row of NaN gets some index of its own."""
    last = torch.nextafter(ends[:, -1:], torch.zeros((), dtype=ends.dtype))
    inside = torch.minimum(target.clamp_min(0.0), last)
    return torch.searchsorted(ends, inside, right=True).clamp_max(ends.shape[1] - 1)
