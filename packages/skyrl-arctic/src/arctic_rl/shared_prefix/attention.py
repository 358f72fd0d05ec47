"""Attention over a row of packed groups: prompt to itself, responses to their one prompt, each response to itself.

The parts are merged by their log-sum-exp, so the result is that of n separate sequences (FlashAttention, arXiv
2205.14135, section 3.1). Backward runs each part with the merged output and log-sum-exp (ring attention, arXiv
2310.01889), so gradients of a prompt's keys come out summed over its responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from arctic_rl.shared_prefix.kernels import Kernel, pick
from arctic_rl.shared_prefix.layout import Group, Layout

NAME = "shared_prefix"
"""Of the attention implementation, and of the model's keyword that carries the layout."""

_packed_row: ContextVar[bool] = ContextVar("packed_row", default=False)


def install(model: Any) -> None:
    """Makes the model attend by the layout where it is given one, and as `sdpa` does where it is not."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)


@contextmanager
def without_mask() -> Iterator[None]:
    """While it is open, the model builds no attention mask: the layout says everything."""
    token = _packed_row.set(True)
    try:
        yield
    finally:
        _packed_row.reset(token)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, N, H, D] of query [1, H, N, D], key and value [1, G, N, D], in transformers' form.

    The choice hangs on the keyword, which gradient checkpointing keeps for its second forward. ValueError for what the
    layout does not cover: a mask, dropout or a sliding window.
    """
    layout = others.pop(NAME, None)
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    refused = {"an attention mask": attention_mask is not None, "attention dropout": dropout > 0}
    refused["a sliding window"] = others.get("sliding_window") is not None
    for what, is_there in refused.items():
        if is_there:
            raise ValueError(f"a row of packed groups cannot be attended with {what}: see shared_prefix.coverage")
    if query.shape[0] != 1 or query.shape[2] != layout.num_tokens:
        raise ValueError(f"the layout is of [1, {layout.num_tokens}] tokens, the row is {list(query.shape[::2])}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return shared_prefix_attention(query, key, value, layout, scale).transpose(1, 2), None


def shared_prefix_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """[1, H, N, D] of query [1, H, N, D], key and value [1, G, N, D] (G divides H), with gradients."""
    out: torch.Tensor = _SharedPrefix.apply(query, key, value, layout, scale)
    return out


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _packed_row.get() else sdpa_mask(*args, **kwargs)


class _SharedPrefix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, layout: Layout, scale: float) -> torch.Tensor:
        kernel = pick(query)
        _, heads, length, size = query.shape
        output = query.new_empty(1, length, heads, size).transpose(1, 2)
        lse = query.new_empty(
            1, length, heads, dtype=torch.promote_types(query.dtype, torch.float32)
        ).transpose(1, 2)  # fmt: skip
        for group in layout.groups:
            p, r = group.prompt, group.responses
            output[:, :, p], lse[:, :, p] = kernel.forward(
                query[:, :, p], key[:, :, p], value[:, :, p], True, scale
            )  # fmt: skip
            if group.response_lens:
                output[:, :, r], lse[:, :, r] = _responses_forward(kernel, group, query, key, value, scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, output, lse = ctx.saved_tensors
        kernel, given = pick(query), (grads[0], query, key, value, output, lse)
        d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for group in ctx.layout.groups:
            p, r = group.prompt, group.responses
            d_query[:, :, p], d_key[:, :, p], d_value[:, :, p] = kernel.backward(
                tuple(t[:, :, p] for t in given), True, ctx.scale
            )
            if group.response_lens:
                to_prompt, own = _responses_backward(kernel, group, given, ctx.scale)
                d_query[:, :, r] = to_prompt[0] + own[0]
                d_key[:, :, p] += to_prompt[1]
                d_value[:, :, p] += to_prompt[2]
                d_key[:, :, r], d_value[:, :, r] = own[1], own[2]
        return d_query, d_key, d_value, None, None


def _responses_forward(
    kernel: Kernel, group: Group, query: Any, key: Any, value: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    p, r, rows = group.prompt, group.responses, _rows(group.response_lens, query.device)
    far, far_lse = kernel.forward(query[:, :, r], key[:, :, p], value[:, :, p], False, scale)
    split = [rows.split(t[:, :, r]) for t in (query, key, value)]
    near_rows, near_rows_lse = kernel.forward(split[0], split[1], split[2], True, scale)
    near, near_lse = rows.join(near_rows), rows.join(near_rows_lse[..., None])[..., 0]
    lse = torch.logaddexp(far_lse, near_lse)
    merged = far * torch.exp(far_lse - lse)[..., None] + near * torch.exp(near_lse - lse)[..., None]
    return merged.to(query.dtype), lse


def _responses_backward(
    kernel: Kernel, group: Group, given: tuple[torch.Tensor, ...], scale: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of (query, key, value) through the prompt's keys and through the responses' own."""
    p, r, rows = group.prompt, group.responses, _rows(group.response_lens, given[0].device)
    grad, query, key, value, output, lse = given
    part = (grad[:, :, r], query[:, :, r], key[:, :, p], value[:, :, p], output[:, :, r], lse[:, :, r])
    to_prompt = kernel.backward(part, False, scale)
    split = [rows.split(t[:, :, r]) for t in (query, key, value, output)]
    split_lse = rows.split(lse[:, :, r, None])[..., 0]
    own = kernel.backward((rows.split(grad[:, :, r], padding=0.0), *split, split_lse), True, scale)
    return list(to_prompt), [rows.join(t) for t in own]


class _Rows:
    """Moves the responses of a group between one line [1, H, M, D] and rows [n, H, R, D], R being the longest.

    What fills a short row is its own last token again: no real token attends to it, and its gradient is zero.
    """

    def __init__(self, lens: tuple[int, ...], device: torch.device) -> None:
        self.count, self.width = len(lens), max(lens)
        self.is_even = min(lens) == self.width
        if not self.is_even:
            lens_n1 = torch.tensor(lens, device=device)[:, None]
            columns_nR = torch.arange(self.width, device=device).expand(self.count, -1)
            ends_n1 = torch.cumsum(lens_n1, 0)
            self.source_nR = torch.minimum(ends_n1 - lens_n1 + columns_nR, ends_n1 - 1)
            self.is_real_nR = columns_nR < lens_n1
            self.real_M = self.is_real_nR.flatten().nonzero()[:, 0]

    def split(self, line: torch.Tensor, padding: float | None = None) -> torch.Tensor:
        if self.is_even:
            return line[0].unflatten(1, (self.count, self.width)).transpose(0, 1)
        rows = line[0][:, self.source_nR].transpose(0, 1)
        return rows if padding is None else rows.masked_fill(~self.is_real_nR[:, None, :, None], padding)

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        line = rows.transpose(0, 1).flatten(1, 2)
        return (line if self.is_even else line[:, self.real_M])[None]


@lru_cache(maxsize=256)
def _rows(lens: tuple[int, ...], device: torch.device) -> _Rows:
    """The same for every layer of a pass."""
    return _Rows(lens, device)
