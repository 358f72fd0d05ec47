"""An agent in a process of its own that generates: `python agent_process.py URL REQUEST_ID MAX_TOKENS GRACE_S SAMPLES`.

It prints "running" when the first tokens have arrived, and at the end the ids of every token, a line per sample.
"""

from __future__ import annotations

import asyncio
import sys

from skyrl_rollout.client import RolloutClient
from skyrl_rollout.tokens import LogprobMode, Sampling

PROMPT = [4, 5, 6]


def sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=11, ignore_eos=True)


async def main(url: str, request_id: str, max_tokens: str, grace_s: str, num_samples: str) -> None:
    said: list[int] = []

    def progress(num_tokens: int) -> None:
        if not said:
            print("running", flush=True)
        said.append(num_tokens)

    async with await RolloutClient.connect(url) as client:
        generation = await client.generate(
            PROMPT, sampling(int(max_tokens)), mode=LogprobMode.SAMPLING, timeout_s=60, request_id=request_id,
            num_samples=int(num_samples), detach_grace_s=float(grace_s), tokens_per_event=4, on_progress=progress,
        )  # fmt: skip
    for sample in generation.samples:
        print(*sample.token_ids.tolist(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
