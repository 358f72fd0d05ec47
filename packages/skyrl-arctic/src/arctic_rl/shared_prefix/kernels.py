"""Which kernels compute one part of an attention, forward with the log-sum-exp and backward from a given one.

No part has a mask or dropout. A kernel's backward takes the output and log-sum-exp of the whole attention, of which the
part is one summand (the identity of ring attention, arXiv 2310.01889): its probabilities are exp(q k - lse) either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
Given = tuple[torch.Tensor, ...]
Backward = Callable[[Given, bool, float], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

FLASH_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """forward(query_BHQD, key_BGKD, value_BGKD, is_causal, scale) -> (output_BHQD, lse_BHQ), G divides H;
    backward((grad_output, query, key, value, output, lse), is_causal, scale) -> gradients of query, key and value."""

    forward: Forward
    backward: Backward


def pick(query: torch.Tensor) -> Kernel:
    """torch's flash kernels where they take the device, dtype and head size, else matrix products with all scores."""
    if query.device.type == "cpu":
        return FLASH_CPU
    if query.device.type == "cuda" and query.dtype in FLASH_DTYPES and query.shape[-1] % 8 == 0:
        return FLASH_CUDA
    return PLAIN


def _cpu_forward(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)


def _cpu_backward(given: Given, is_causal: bool, scale: float) -> Any:
    grad, query, key, value, output, lse = given
    # the kernel reads a log-sum-exp laid out as its own forward lays it out: heads innermost
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, is_causal, scale=scale
    )


def _cuda_forward(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Any:
    key, value = _to_heads(query, key), _to_heads(query, value)
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
    return found[0], found[1]


def _cuda_backward(given: Given, is_causal: bool, scale: float) -> Any:
    grad, query, key, value, output, lse = given
    groups, q_len, k_len = key.shape[1], query.shape[2], key.shape[2]
    key, value = _to_heads(query, key), _to_heads(query, value)
    unused = torch.empty(0, dtype=torch.uint64, device=query.device)  # no dropout: no random state
    d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, output, lse.contiguous(), None, None, q_len, k_len, 0.0, is_causal, unused, unused,
        scale=scale,
    )  # fmt: skip
    return d_query, _from_heads(d_key, groups), _from_heads(d_value, groups)


def _plain_forward(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Any:
    scores = _scores(query, key, is_causal, scale)
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse[..., None])
    return (probabilities @ _to_heads(query, value).to(scores.dtype)).to(query.dtype), lse


def _plain_backward(given: Given, is_causal: bool, scale: float) -> Any:
    grad, query, key, value, output, lse = given
    groups, wide = key.shape[1], lse.dtype
    probabilities = torch.exp(_scores(query, key, is_causal, scale) - lse[..., None])
    grad, output = grad.to(wide), output.to(wide)
    d_value = probabilities.transpose(-1, -2) @ grad
    d_probabilities = grad @ _to_heads(query, value).to(wide).transpose(-1, -2)
    d_scores = probabilities * (d_probabilities - (grad * output).sum(-1, keepdim=True)) * scale
    d_query = d_scores @ _to_heads(query, key).to(wide)
    d_key = d_scores.transpose(-1, -2) @ query.to(wide)
    return (
        d_query.to(query.dtype),
        _from_heads(d_key, groups).to(key.dtype),
        _from_heads(d_value, groups).to(key.dtype),
    )


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    """[B, H, Q, K], in at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ _to_heads(query, key).to(wide).transpose(-1, -2) * scale
    if not is_causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -math.inf)


def _to_heads(query: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Keys or values for each query head."""
    repeats = query.shape[1] // shared.shape[1]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, dim=1)


def _from_heads(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """The sum over the query heads that share a key head."""
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


FLASH_CPU = Kernel(_cpu_forward, _cpu_backward)
FLASH_CUDA = Kernel(_cuda_forward, _cuda_backward)
PLAIN = Kernel(_plain_forward, _plain_backward)
