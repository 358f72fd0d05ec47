"""Prompts that vLLM computes in parts give the samples of prompts that it computes at once."""

from __future__ import annotations

import asyncio

import pytest
from serve_process import TINY_MODEL, ServeProcess
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.tokens import LogprobMode, Sampling

pytestmark = pytest.mark.ci
PROMPTS = [[5 + (7 * row + 3 * i) % 40 for i in range(50 + 20 * row)] for row in range(8)]
CUT = ("--max-num-seqs", "16", "--engine-arg", "max_num_batched_tokens=64")


async def samples_of(client: RolloutClient) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of two seeded samples of every prompt, all at once."""
    sampling = Sampling(max_tokens=12, seed=3, ignore_eos=True)
    made = await asyncio.gather(
        *(client.generate(p, sampling, mode=LogprobMode.SAMPLING, timeout_s=60, num_samples=2) for p in PROMPTS)
    )
    return [(s.token_ids.tolist(), s.logprobs.tolist()) for g in made for s in g.samples]


async def test_a_seeded_request_draws_the_same_however_its_prompt_is_cut(client: RolloutClient) -> None:
    whole = await samples_of(client)
    with ServeProcess(TINY_MODEL, *CUT) as server:
        async with await RolloutClient.connect(server.url, timeout_s=20) as other:
            cut = await samples_of(other)
    for (tokens, logprobs), (expected, expected_logprobs) in zip(cut, whole, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)
