"""One client process with many open generations over a pool of servers: its CPU and its memory.

Runs fresh for every point of the curve, because memory that one point has used would hide that of the next.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.tokens import LogprobMode, Sampling

from benches.worker import answer_questions

PROMPT = list(range(3, 35))
TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.1
READY_S = 60.0


def resident_nbytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def wave(pool: RolloutPool, streams: int, tokens: int, token_delay_s: float) -> dict[str, float]:
    """`streams` generations at the same time: CPU and wall clock, and memory once all of them were open.

    open_streams: what the servers themselves counted as running when the memory was read.
    """
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    slowly = {"token_delay_s": token_delay_s}
    before, began, cpu = resident_nbytes(), time.perf_counter(), time.process_time()
    work = asyncio.gather(
        *(
            pool.generate(PROMPT, sampling, mode=LogprobMode.TEMPERATURE, timeout_s=TIMEOUT_S, backend_options=slowly)
            for _ in range(streams)
        )
    )
    found = {"open_streams": 0.0, "opened_nbytes": 0.0}
    while not work.done():
        await asyncio.sleep(LOOK_EVERY_S)
        reports = await asyncio.gather(*(client.status(timeout_s=READY_S) for client in pool.clients))
        running = sum(report.running for report in reports)
        if running > found["open_streams"]:
            found = {"open_streams": running, "opened_nbytes": resident_nbytes() - before}
    made = await work
    assert all(len(g.samples[0].token_ids) == tokens for g in made)
    return {
        **found,
        "samples": len(made),
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
    }


async def run(urls: list[str]) -> None:
    """Connect, then answer until stdin ends."""
    async with await RolloutPool.connect(urls, timeout_s=READY_S) as pool:

        async def answer(question: dict[str, Any]) -> dict[str, float]:
            return await wave(pool, **question)

        await answer_questions(answer)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
