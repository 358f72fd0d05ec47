"""How long other calls take meanwhile: GetServerInfo and a status in turns at a fixed rate, from a process of its own.

Calls start on a fixed schedule, whether or not earlier ones were answered, so that a stall counts for every call that
falls into it. Answers what `benches.weights` asks: [start, latency] of all calls since the last question, in seconds of
the machine's monotonic clock.
"""

import asyncio
import sys
import time
from typing import Any

from skyrl_rollout.client import RolloutClient

from benches.worker import answer_questions

PERIOD_S = 0.02
CALL_TIMEOUT_S = 60.0


async def ping(client: RolloutClient, calls: list[tuple[float, float]]) -> None:
    """Calls on schedule, for ever; a late wake-up counts as latency, because a caller would have waited too."""
    due_s, open_calls = time.monotonic(), set()

    async def call(number: int, due_s: float) -> None:
        if number % 2:
            await client.refresh(timeout_s=CALL_TIMEOUT_S)
        else:
            await client.status(timeout_s=CALL_TIMEOUT_S)
        calls.append((due_s, time.monotonic() - due_s))

    number = 0
    while True:
        task = asyncio.create_task(call(number, due_s))
        open_calls.add(task)
        task.add_done_callback(open_calls.discard)
        number, due_s = number + 1, due_s + PERIOD_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def run(url: str) -> None:
    """Ping until stdin ends."""
    calls: list[tuple[float, float]] = []

    async def answer(_: Any) -> list[tuple[float, float]]:
        taken = calls.copy()
        calls.clear()
        return taken

    async with await RolloutClient.connect(url, timeout_s=30) as client:
        pinging = asyncio.create_task(ping(client, calls))
        await answer_questions(answer)
        pinging.cancel()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
