"""Logprobs and entropy of chosen tokens without the logits of all positions: the LM head, a tile of them at a time.

Backward computes each tile again, so [T, V] never exists, in no precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

COPIES = 3
"""A tile's logits, its probabilities and what backward makes of them stand side by side."""


def tile_size(vocabulary: int, budget_bytes: int, *, bytes_per_number: int = 4) -> int:
    """Positions per tile whose logits take at most `budget_bytes`, at least one."""
    return max(1, budget_bytes // (COPIES * vocabulary * bytes_per_number))


def num_tiles(positions: int, vocabulary: int, budget_bytes: int, *, bytes_per_number: int = 4) -> int:
    """How many tiles a batch takes. Ranks whose head gathers its weight take the largest of theirs."""
    return max(1, math.ceil(positions / tile_size(vocabulary, budget_bytes, bytes_per_number=bytes_per_number)))


def plain_head(head: Any, name: str = "lm_head") -> nn.Linear:
    """The head, if its logits are one matrix product of its own weight. ValueError names what else it is."""
    if type(head) is not nn.Linear or head._forward_pre_hooks or head._forward_hooks:
        raise ValueError(
            f"{name} is {type(head).__name__}, perhaps with hooks: tiles need a plain torch.nn.Linear; "
            "leave the head out of the adapter's target modules"
        )
    return head


def chunked_logprobs(
    hidden_TD: torch.Tensor,
    head: nn.Linear,
    labels_T: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    budget_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logprobs_T, entropy_T or None) of softmax(head(hidden) / temperature), in float32 (float64 stays float64).

    Entropy is H = -sum p log p, in nats. Both carry gradients to the hidden states and to the head, whose weight may be
    that of the embedding too. ValueError for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no logprobs to train on: it must be above 0")
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    tiles = num_tiles(hidden_TD.shape[0], head.out_features, budget_bytes, bytes_per_number=wide.itemsize)
    logprobs_T, entropy_T = _Tiles.apply(
        hidden_TD, head.weight, head.bias, labels_T, (temperature, tiles, with_entropy)
    )
    return logprobs_T, entropy_T if with_entropy else None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, how: tuple[float, int, bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        temperature, tiles, with_entropy = how
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, lse = (hidden.new_empty(len(labels), dtype=wide) for _ in range(2))
        entropy = hidden.new_empty(len(labels) if with_entropy else 0, dtype=wide)
        for cut in _cuts(len(labels), tiles):
            logits = _logits(hidden[cut], weight, bias, temperature)
            lse[cut] = torch.logsumexp(logits, -1)
            logprobs[cut] = logits.gather(-1, labels[cut, None])[:, 0] - lse[cut]
            if with_entropy:
                # H = lse - sum p z
                entropy[cut] = lse[cut] - (torch.exp(logits - lse[cut, None]) * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy)
        ctx.temperature, ctx.tiles = temperature, tiles
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if needs_bias else None
        for cut in _cuts(len(labels), ctx.tiles):
            logits = _logits(hidden[cut], weight, bias, ctx.temperature)
            logp = logits - lse[cut, None]
            p = torch.exp(logp)
            # d logp_y / d z = onehot - p;  d H / d z = -p (log p + H)
            d_logits = -p * grads[0][cut, None]
            d_logits.scatter_add_(-1, labels[cut, None], grads[0][cut, None])
            if entropy.numel():
                d_logits -= grads[1][cut, None] * p * (logp + entropy[cut, None])
            d_logits /= ctx.temperature
            if d_hidden is not None:
                d_hidden[cut] = d_logits.to(weight.dtype) @ weight
            if d_weight is not None:
                d_weight += d_logits.to(hidden.dtype).T @ hidden[cut]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = nn.functional.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _cuts(positions: int, tiles: int) -> list[slice]:
    size = max(1, -(-positions // tiles))
    return [slice(start, min(start + size, positions)) for start in range(0, positions, size)]
