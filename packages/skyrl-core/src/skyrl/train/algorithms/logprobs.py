"""Logprobs of the sampled tokens and the entropy of their distributions, from logits, block by block."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, *, temperature: float, with_entropy: bool, block: int | None = 1024
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logprobs_T, entropy_T or None) of softmax(logits / temperature), in float32 (float64 logits stay float64).

    Entropy is H = -sum p log p, in nats. `block` positions (None: all) are widened to float32 at once and recomputed
    in backward, so a bfloat16 [T, V] never exists a second time in float32.
    ValueError for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no logprobs to train on: it must be above 0")
    if block is None or logits_TV.shape[0] <= block:
        return _block(logits_TV, labels_T, temperature, with_entropy)
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor | None] = []
    for start in range(0, logits_TV.shape[0], block):
        cut = slice(start, start + block)
        arguments = (logits_TV[cut], labels_T[cut], temperature, with_entropy)
        recompute = torch.is_grad_enabled() and logits_TV.requires_grad
        part = checkpoint(_block, *arguments, use_reentrant=False) if recompute else _block(*arguments)
        logprobs.append(part[0])
        entropies.append(part[1])
    return torch.cat(logprobs), torch.cat([e for e in entropies if e is not None]) if with_entropy else None


def _block(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    wide = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    scaled_TV = wide if temperature == 1.0 else wide / temperature
    logprobs_TV = torch.log_softmax(scaled_TV, dim=-1)
    logprobs_T = logprobs_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    if not with_entropy:
        return logprobs_T, None
    return logprobs_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)
