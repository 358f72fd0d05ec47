"""The served model under transformers: what the server must agree with, and other weights to publish."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from skyrl_rollout.weights.manifest import TensorLayout
from transformers import AutoModelForCausalLM

PROMPT_TOKENS = 12


class ServedModel:
    """float32 on one thread; parameters under their checkpoint names."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.vocab_size = self.module.config.vocab_size
        self.original = {n: t.clone() for n, t in self.module.state_dict().items()}

    def prompts(self, count: int, *, length: int = PROMPT_TOKENS, seed: int = 0) -> list[list[int]]:
        draw = np.random.default_rng(seed)
        return draw.integers(3, self.vocab_size, size=(count, length)).tolist()

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuations without end tokens, by full forward passes."""
        ids = torch.tensor(prompts)
        start = ids.shape[1]
        for _ in range(max_tokens):
            ids = torch.cat([ids, self.module(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids[:, start:].tolist()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: np.ndarray, temperature: float) -> np.ndarray:
        """log_softmax(logits / temperature) of `tokens` after `prompt`, as a trainer computes it: float32 [n]."""
        ids = torch.tensor([[*prompt, *tokens.tolist()]])
        logits = self.module(ids).logits[0, len(prompt) - 1 : -1] / temperature
        picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens.tolist())[:, None])
        return picked[:, 0].numpy()

    def use(self, weights: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict(weights)

    def perturbed(self, seed: int, *, scale: float = 0.2) -> dict[str, torch.Tensor]:
        """Other weights: each tensor plus noise of `scale` times its own spread; tied tensors stay tied."""
        noise = torch.Generator().manual_seed(seed)
        out: dict[str, torch.Tensor] = {}
        by_memory: dict[int, torch.Tensor] = {}
        for name, parameter in self.module.state_dict().items():
            key = parameter.data_ptr()
            if key not in by_memory:
                base = self.original[name]
                spread = scale * (float(base.std()) if base.numel() > 1 else 1.0)
                by_memory[key] = base + max(spread, 1e-3) * torch.randn(base.shape, generator=noise)
            out[name] = by_memory[key]
        return out


def as_tensors(weights: dict[str, torch.Tensor], layout: tuple[TensorLayout, ...]) -> Iterator[tuple[str, memoryview]]:
    """The bytes of every tensor of `layout`, as a trainer streams them."""
    for t in layout:
        data = weights[t.name].contiguous()
        assert data.dtype == torch.float32 and data.numel() == math.prod(t.shape)
        yield t.name, memoryview(data.numpy()).cast("B")
