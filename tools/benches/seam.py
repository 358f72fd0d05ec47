"""What the seam costs: tokens/s of the same requests through gRPC and through vLLM's `AsyncLLM` in-process.

Both ways use the same two cores, the same engine arguments and the same sampling, in turns, and both hand over ids and
logprobs as arrays at the end of each sample. Through gRPC a client process and the server's front do the work that the
one process does in-process. Of two processes that do the same, the one that was started first was seen to be 5 to 10 %
slower, so each way is the first one in half of the rounds.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ServedProcess
from skyrl_rollout.tokens import LogprobMode, Sampling

from benches.report import Figure, Report, spread, versions_here
from benches.vllm_environment import TINY_MODEL, server_binary, smollm2
from benches.worker import Worker

ANSWER_S = 1800.0
START_S = 300.0
VOCABULARY = 100  # the tiny model's: every model here has these ids


@dataclass(frozen=True)
class Load:
    """One model and how much is asked of it in a round; at_least: bound of the ratio."""

    name: str
    model: Path
    requests: int
    at_least: float


@dataclass(frozen=True)
class Size:
    """Requests at a time, their lengths, how many rounds in each order of starting, and how many orders."""

    concurrent: int = 64
    prompt_tokens: int = 32
    new_tokens: int = 128
    rounds: int = 4
    orders: int = 2


def loads(small: bool) -> tuple[Load, ...]:
    """The models, smallest first; in small the tiny one only."""
    if small:
        return (Load("tiny", TINY_MODEL, 8, 0.90),)
    return Load("tiny", TINY_MODEL, 256, 0.90), Load("SmolLM2-135M", smollm2(), 64, 0.97)


async def measure(small: bool) -> Report:
    """tokens/s both ways and their ratio, per model."""
    size = Size(concurrent=8, prompt_tokens=8, new_tokens=8, rounds=1, orders=1) if small else Size()
    figures: list[Figure] = []
    for load in loads(small):
        figures += await measure_model(load, size)
    return Report("seam", figures, asdict(size), not small, versions_here())


async def measure_model(load: Load, size: Size) -> list[Figure]:
    """One model: each way is started first once, and in each order they take turns after a round of warming up."""
    seconds: dict[str, list[float]] = {way: [] for way in OPENED}
    rng = np.random.default_rng(0)
    for order in (list(OPENED), list(OPENED)[::-1])[: size.orders]:
        async with AsyncExitStack() as stack:
            ask = {way: await stack.enter_async_context(OPENED[way](load, size)) for way in order}
            for number in range(size.rounds + 1):
                prompts = rng.integers(3, VOCABULARY, (load.requests, size.prompt_tokens)).tolist()
                question = {"prompts": prompts, "new_tokens": size.new_tokens, "concurrent": size.concurrent}
                for way in sorted(ask, reverse=bool(number % 2)):
                    answer = await asyncio.wait_for(ask[way](question), ANSWER_S)
                    if number:
                        seconds[way].append(answer["seconds"])
    return figures_of(load, size, seconds)


Asked = Callable[[dict[str, Any]], Awaitable[dict[str, float]]]


@asynccontextmanager
async def opened_server(load: Load, size: Size) -> AsyncIterator[Asked]:
    """`arctic-serve` and a client of it in this process."""
    serve = [str(server_binary("arctic-serve")), *engine_flags(load, size), "--listen", "127.0.0.1:0"]
    with ServedProcess(serve, start_timeout_s=START_S) as server:
        async with await RolloutClient.connect(server.url, timeout_s=30) as client:
            yield lambda question: through_grpc(client, **question)


@asynccontextmanager
async def opened_in_process(load: Load, size: Size) -> AsyncIterator[Asked]:
    """`AsyncLLM` in a process of its own, which has answered once."""
    flags = engine_flags(load, size)
    async with Worker("benches.vllm_in_process", *flags, python=str(server_binary("python"))) as worker:
        await worker.ask({"prompts": [[3]], "new_tokens": 1, "concurrent": 1})
        yield worker.ask


def engine_flags(load: Load, size: Size) -> list[str]:
    """What both ways are started with."""
    context = 2 * (size.prompt_tokens + size.new_tokens)
    return ["--model", str(load.model), "--max-model-len", str(context), "--max-num-seqs", str(size.concurrent)]


OPENED = {"gRPC": opened_server, "in-process": opened_in_process}


def figures_of(load: Load, size: Size, seconds: dict[str, list[float]]) -> list[Figure]:
    """Medians of the rounds; the ratio is that of each round's two neighbours, and their median over both orders."""
    tokens = load.requests * size.new_tokens
    ratios = [a / b for a, b in zip(seconds["in-process"], seconds["gRPC"], strict=True)]
    ratio, least, most = spread(ratios)
    rates = [Figure(f"{load.name}, {way}", tokens / spread(s)[0], "tokens/s") for way, s in seconds.items()]
    by_order = zip(
        ("first", "second"), [ratios[i : i + size.rounds] for i in range(0, len(ratios), size.rounds)], strict=False
    )
    return [
        *rates,
        Figure(f"{load.name}, gRPC over in-process", ratio, "", at_least=load.at_least),
        *(Figure(f"{load.name}, the same where gRPC was started {n}", spread(r)[0], "") for n, r in by_order),
        Figure(f"{load.name}, smallest ratio of a round", least, ""),
        Figure(f"{load.name}, largest ratio of a round", most, ""),
    ]


async def through_grpc(
    client: RolloutClient, prompts: list[list[int]], new_tokens: int, concurrent: int
) -> dict[str, float]:
    """All prompts, `concurrent` at a time, by our client."""
    sampling = Sampling(max_tokens=new_tokens, temperature=1.0, ignore_eos=True)
    turn = asyncio.Semaphore(concurrent)

    async def one(prompt: list[int]) -> int:
        async with turn:
            made = await client.generate(prompt, sampling, mode=LogprobMode.SAMPLING, timeout_s=ANSWER_S)
        (sample,) = made.samples
        assert len(sample.token_ids) == new_tokens and np.isfinite(sample.logprobs).all()
        return len(sample.token_ids)

    began = time.perf_counter()
    counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return {"seconds": time.perf_counter() - began, "tokens": sum(itertools.chain(counts))}
