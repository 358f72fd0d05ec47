"""A transformers server in a process of its own, the engine without one, and the model that both must agree with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import skyrl.train.quickstart
import torch
from skyrl.serve.batch import Limits
from skyrl.serve.engine import TransformersEngine
from skyrl.serve.model import ServedModel, cache_argument
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ServedProcess
from transformers import AutoModelForCausalLM, DynamicCache

TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"
COMMAND = (sys.executable, "-m", "skyrl.serve", "--model", str(TINY_MODEL), "--listen", "127.0.0.1:0")


class Teacher:
    """The same checkpoint under plain transformers, float32 on one thread."""

    folder = TINY_MODEL

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.module = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
        self.original = {n: t.clone() for n, t in self.module.state_dict().items() if n != "lm_head.weight"}
        self.vocab_size = self.module.config.vocab_size

    def prompts(self, count: int, *, shortest: int = 1, longest: int = 60, seed: int = 0) -> list[list[int]]:
        """Random ids of mixed lengths."""
        draw = np.random.default_rng(seed)
        lengths = draw.integers(shortest, longest + 1, size=count)
        return [draw.integers(3, self.vocab_size, size=int(n)).tolist() for n in lengths]

    @torch.no_grad()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What `generate` of transformers answers, greedily and without end tokens."""
        self.module.generation_config.eos_token_id = None
        ids = torch.tensor([prompt])
        made = self.module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
        )
        return made[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, prompt, tokens) -> np.ndarray:
        """float32 [n, V] before each of `tokens`, from one forward pass."""
        ids = torch.tensor([[*prompt, *tokens]])
        return self.module(ids).logits[0, len(prompt) - 1 : -1].numpy()

    def logprobs(self, prompt, tokens, temperature: float = 1.0) -> np.ndarray:
        """log_softmax(logits / temperature) of `tokens` after `prompt`: float32 [n]."""
        logprobs = torch.log_softmax(torch.from_numpy(self.logits(prompt, tokens)) / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor([*tokens])[:, None])[:, 0].numpy()

    @torch.no_grad()
    def logprobs_over_a_swap(self, prompt, tokens, cut: int, new: dict[str, torch.Tensor]) -> np.ndarray:
        """Those of tokens[cut:] under new weights that attend to the KV of the old ones."""
        cache, ids = {cache_argument(self.module): DynamicCache()}, torch.tensor([[*prompt, *tokens]])
        seen = len(prompt) + cut - 1
        self.module(ids[:, :seen], **cache, use_cache=True)
        self.use(new)
        logits = self.module(ids[:, seen:-1], **cache, use_cache=True).logits[0]
        picked = torch.log_softmax(logits, -1).gather(1, ids[0, seen + 1 :, None])
        self.use(self.original)
        return picked[:, 0].numpy()

    def use(self, weights: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict(weights, strict=False)

    def perturbed(self, seed: int, *, scale: float = 0.2) -> dict[str, torch.Tensor]:
        """Other weights: each tensor plus noise of `scale` times its own spread."""
        noise = torch.Generator().manual_seed(seed)
        return {
            n: t + max(scale * float(t.std()), 1e-3) * torch.randn(t.shape, generator=noise)
            for n, t in self.original.items()
        }


@pytest.fixture(scope="session")
def teacher() -> Teacher:
    return Teacher()


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess(COMMAND) as served:
        yield served


@pytest.fixture
async def client(server: ServedProcess) -> AsyncIterator[RolloutClient]:
    async with await RolloutClient.connect(server.url) as connected:
        yield connected


@pytest.fixture
async def build() -> AsyncIterator[Callable[..., Awaitable[TransformersEngine]]]:
    """Makes engines in this process; they are closed after the test."""
    engines: list[TransformersEngine] = []

    async def make(**limits: int) -> TransformersEngine:
        model = await asyncio.to_thread(ServedModel, TINY_MODEL, device="cpu", dtype="auto", max_context=None)
        engines.append(TransformersEngine(model, Limits(**limits)))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()
