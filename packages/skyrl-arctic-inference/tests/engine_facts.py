"""Run in the server's environment: one vLLM engine behind the kit's contract, and what it does, as one JSON object.

usage: engine_facts.py MODEL_DIR WORK_DIR
WORK_DIR holds other.safetensors (weights of a whole checkpoint) and adapter-1.safetensors, adapter-2.safetensors
(rank RANK, alpha ALPHA). Each scenario below is a key of the object; the tests compare its value with transformers.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from skyrl_arctic_inference import front_watch
from skyrl_arctic_inference.engine.identity import read_model_folder
from skyrl_arctic_inference.engine.launch import start_engine
from skyrl_arctic_inference.settings import ServeSettings
from skyrl_rollout.errors import RolloutError
from skyrl_rollout.server.engine import (
    Adapter,
    CollectiveTransfer,
    EngineRequest,
    EngineScoreRequest,
    PromptRead,
    SampleEnded,
    TokensMade,
)
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights.manifest import TensorLayout

MODEL_FILE = "model.safetensors"
CONTEXT, SLOTS, LAG_S = 512, 8, 0.1
RANK, ALPHA = 4, 6.0
RAW, TEMPERATURE, SAMPLING = LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING
Facts = dict[str, Any]


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 100, size=count).astype(np.int32)


def generation(name: str, prompt: np.ndarray, sampling: Sampling, mode: LogprobMode = TEMPERATURE, **more: Any):
    return EngineRequest(name, prompt, sampling, mode, more.pop("num_samples", 1), more.pop("salt", "@0"), **more)


async def read(engine, request: EngineRequest, *, lag_s: float = 0.0, seen: Facts | None = None) -> Facts:
    """The items of one request, joined; with lag_s its reader sleeps after each of them."""
    seen = {} if seen is None else seen
    seen.update(prompt=request.prompt_token_ids.tolist(), token_ids=[], logprobs=[], top_ids=[], top_logprobs=[])
    async for item in engine.generate(request):
        if isinstance(item, PromptRead):
            assert not seen["token_ids"] and "cached" not in seen
            seen["cached"] = item.cached_tokens
            seen["prompt_logprobs"] = None if item.logprobs is None else item.logprobs.tolist()
        elif isinstance(item, TokensMade):
            seen["token_ids"] += item.token_ids.tolist()
            seen["logprobs"] += item.logprobs.tolist()
            if item.top is not None:
                seen["top_ids"] += item.top.token_ids.tolist()
                seen["top_logprobs"] += item.top.logprobs.tolist()
        elif isinstance(item, SampleEnded):
            seen["num_preemptions"], seen["reason"] = item.num_preemptions, item.reason.name
        await asyncio.sleep(lag_s)
    return seen


async def score(engine, ids: np.ndarray, first: int, mode: LogprobMode, temperature: float, **more: Any) -> Facts:
    request = EngineScoreRequest("score", ids, first, mode, temperature, more.pop("top", 0), "@0", **more)
    engine.check_score(request)
    items = [item async for item in engine.score(request)]
    top = [item.top for item in items if item.top is not None]
    return {
        "token_ids": ids.tolist(),
        "logprobs": [x for item in items for x in item.logprobs.tolist()],
        "top_ids": [row for t in top for row in t.token_ids.tolist()],
        "top_logprobs": [row for t in top for row in t.logprobs.tolist()],
    }


def tensors_of(file: Path) -> Iterator[tuple[TensorLayout, memoryview]]:
    with safe_open(file, "np") as opened:
        for name in sorted(opened.keys()):
            array = np.ascontiguousarray(opened.get_tensor(name))
            yield TensorLayout(name, "f32", array.shape), memoryview(array).cast("B")


async def refusal(call: Callable[[], Any]) -> str:
    """The class and message of what the call raises."""
    try:
        value = call()
        if asyncio.iscoroutine(value):
            await value
    except (RolloutError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


async def capabilities(engine, work: Path) -> Facts:
    offers = engine.capabilities
    return {
        "max_top_logprobs": offers.max_top_logprobs, "prompt_logprobs": offers.prompt_logprobs, "score": offers.score,
        "priority": offers.priority, "reset_cache": offers.reset_cache, "lora": offers.lora,
        "sleep_levels": offers.sleep_levels, "collectives": offers.collectives,
    }  # fmt: skip


async def beside(engine, work: Path) -> Facts:
    """Top logprobs of the whole vocabulary and logprobs of the prompt, in each mode."""
    sampling = {
        m: Sampling(max_tokens=12, temperature=t, seed=1, ignore_eos=True) for m, t in ((RAW, 1.0), (TEMPERATURE, 0.5))
    }
    asked = [
        generation(m.name, tokens(300, 1), s, m, top_logprobs=100, prompt_last_n=n)
        for (m, s), n in zip(sampling.items(), (300, 40), strict=True)
    ]
    single = generation("single", tokens(1, 2), sampling[RAW], RAW, prompt_last_n=1)
    plain = generation("plain", tokens(300, 1), sampling[RAW], RAW)
    answers = await asyncio.gather(*(read(engine, r) for r in (*asked, single, plain)))
    shaped = generation("x", tokens(9, 1), Sampling(top_p=0.5, max_tokens=1), SAMPLING, prompt_last_n=1)
    return {
        "raw": answers[0], "half": answers[1], "single": answers[2], "plain": answers[3],
        "shaped": await refusal(lambda: engine.check(shaped)),
    }  # fmt: skip


async def scores(engine, work: Path) -> Facts:
    """A full context, a middle, a pair; and running requests beside it."""
    running = asyncio.create_task(
        read(engine, generation("r", tokens(9, 3), Sampling(max_tokens=200, ignore_eos=True)))
    )
    full, middle, pair = await asyncio.gather(
        score(engine, tokens(CONTEXT, 4), 1, RAW, 0.7, top=3),
        score(engine, tokens(400, 5), 350, TEMPERATURE, 0.5, top=100),
        score(engine, tokens(2, 6), 1, SAMPLING, 0.0),
    )
    await running
    hot = EngineScoreRequest("s", tokens(4, 1), 1, TEMPERATURE, 1e-6, 0, "@0")
    return {"full": full, "middle": middle, "pair": pair, "hot": await refusal(lambda: engine.check_score(hot))}


async def cache(engine, work: Path) -> Facts:
    """Hits by salt, what a reset frees, and what it costs a running request."""
    await engine.reset_cache(preempt_running=False)
    prompt, short = tokens(300, 7), Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    hits = [(await read(engine, generation(f"c{i}", prompt, short, salt=s)))["cached"] for i, s in enumerate("aab")]
    freed = [await engine.reset_cache(preempt_running=False) for _ in range(2)]
    after = (await read(engine, generation("after", prompt, short, salt="a")))["cached"]
    long = Sampling(max_tokens=200, seed=5, ignore_eos=True)
    undisturbed = await read(engine, generation("u", prompt, long))
    running = asyncio.create_task(read(engine, generation("p", prompt, long)))
    while engine.tokens_made().get("p", [0])[0] < 20:
        await asyncio.sleep(0.002)
    refused = await refusal(lambda: engine.reset_cache(preempt_running=False))
    preempted = await engine.reset_cache(preempt_running=True)
    return {
        "hits": hits, "freed": freed, "after": after, "refused": refused, "preempted": preempted,
        "undisturbed": undisturbed, "disturbed": await running,
    }  # fmt: skip


async def priority(engine, work: Path) -> list[str]:
    """In which order requests get the slot that others held."""
    held = [
        asyncio.create_task(read(engine, generation(f"h{i}", tokens(5, i), Sampling(max_tokens=150, ignore_eos=True))))
        for i in range(SLOTS)
    ]
    while sum(sum(counts) > 0 for counts in engine.tokens_made().values()) < SLOTS:
        await asyncio.sleep(0.002)
    order: list[str] = []

    async def one(name: str, level: int) -> None:
        sampling = Sampling(max_tokens=150, ignore_eos=True)
        async for item in engine.generate(generation(name, tokens(5, 1), sampling, num_samples=SLOTS, priority=level)):
            if isinstance(item, TokensMade) and name not in order:
                order.append(name)

    waiting = []
    for name, level in (("low", -5), ("middle", 0), ("high", 7)):
        waiting.append(asyncio.create_task(one(name, level)))
        await asyncio.sleep(0.02)
    await asyncio.gather(*held, *waiting)
    return order


async def adapters(engine, work: Path) -> Facts:
    """Two policies and the base in one batch, a replacement under a running request, and what is refused."""
    layouts = [t for t, _ in tensors_of(work / "adapter-1.safetensors")]
    first = Adapter("a", 1, RANK, ALPHA, ())
    engine.check_adapter(first, layouts)
    sampling = Sampling(max_tokens=300, seed=3, ignore_eos=True)
    facts: Facts = {
        "unknown": await refusal(lambda: read(engine, generation("u", tokens(5, 1), sampling, policy_id="a")))
    }
    await engine.pause("keep", clear_cache=False)
    await engine.load_adapter(first, tensors_of(work / "adapter-1.safetensors"))
    await engine.load_adapter(Adapter("b", 1, RANK, ALPHA, ()), tensors_of(work / "adapter-2.safetensors"))
    await engine.resume()
    names = (("a", "a"), ("b", "b"), ("base", ""))
    asked = [generation(n, tokens(30, 8), sampling, policy_id=p, salt=f"{p}@1", prompt_last_n=9) for n, p in names]
    answers = await asyncio.gather(*(read(engine, r) for r in asked))
    facts |= {n: a for (n, _), a in zip(names, answers, strict=True)}
    facts["scored"] = await score(engine, tokens(60, 9), 1, TEMPERATURE, 0.5, policy_id="b")
    facts["too_many"] = await refusal(lambda: engine.check_adapter(Adapter("c", 1, RANK, ALPHA, ()), layouts))
    running: Facts = {}
    reader = asyncio.create_task(read(engine, generation("r", tokens(30, 8), sampling, policy_id="a"), seen=running))
    while engine.tokens_made().get("r", [0])[0] < 40:
        await asyncio.sleep(0.002)
    await engine.pause("keep", clear_cache=True)
    running["cut"] = engine.tokens_made()["r"][0]
    await engine.load_adapter(Adapter("a", 2, RANK, ALPHA, ()), tensors_of(work / "adapter-2.safetensors"))
    await engine.resume()
    await reader
    await engine.drop_adapter("a")
    await engine.drop_adapter("a")
    dropped = generation("d", tokens(5, 1), sampling, policy_id="a")
    return facts | {"running": running, "dropped": await refusal(lambda: read(engine, dropped))}


async def broken_adapter(engine, work: Path) -> Facts:
    """What the base answers from blocks in which an adapter of NaN left its KV."""
    greedy, prompt = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True), tokens(30, 21)
    before = await read(engine, generation("before", prompt, greedy, RAW))
    layouts = [t for t, _ in tensors_of(work / "adapter-1.safetensors")]
    broken = ((t, memoryview(np.full(t.shape, np.nan, np.float32)).cast("B")) for t in layouts)
    await engine.pause("keep", clear_cache=False)
    await engine.load_adapter(Adapter("broken", 1, RANK, ALPHA, ()), broken)
    await engine.resume()
    asked = [generation(f"broken{i}", prompt, greedy, RAW, policy_id="broken", salt=f"b@{i}") for i in range(SLOTS)]
    bad = await asyncio.gather(*(read(engine, r) for r in asked))
    await engine.drop_adapter("broken")
    asked = [generation(f"after{i}", prompt, greedy, RAW, salt=f"@{i}") for i in range(SLOTS)]
    after = await asyncio.gather(*(read(engine, r) for r in asked))
    return {"before": before, "bad": [x for b in bad for x in b["logprobs"]], "after": after}


async def swap(engine, work: Path) -> list[Facts]:
    """New base weights under requests whose readers lag far behind the engine."""
    seen: list[Facts] = [{} for _ in range(SLOTS)]
    sampling = [Sampling(max_tokens=300, seed=i, ignore_eos=True) for i in range(SLOTS)]
    asked = [generation(f"r{i}", np.asarray([3 + i, 4, 5, 6 + i], np.int32), s) for i, s in enumerate(sampling)]
    readers = [asyncio.create_task(read(engine, r, lag_s=LAG_S, seen=s)) for r, s in zip(asked, seen, strict=True)]
    while len(made := engine.tokens_made()) < SLOTS or min(n for counts in made.values() for n in counts) < 40:
        await asyncio.sleep(0.005)
    await engine.pause("keep", clear_cache=True)
    made = engine.tokens_made()
    for i, s in enumerate(seen):
        s["made_at_pause"], s["seen_at_pause"] = made[f"r{i}"][0], len(s["token_ids"])
    await engine.load_weights(tensors_of(work / "other.safetensors"))
    assert engine.tokens_made() == made
    await engine.resume()
    await asyncio.gather(*readers)
    return seen


async def gloo(engine, work: Path) -> Facts:
    """The first weights again, from another process over gloo; a group that was left; a trainer that is not there."""
    layouts = list(engine.identity.tensors)
    prompt, greedy = tokens(40, 12), Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)

    async def answer(name: str) -> Facts:
        return await read(engine, generation(name, prompt, greedy, RAW, salt=name))

    before = await answer("before")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = CollectiveTransfer("gloo", "127.0.0.1", port, world_size=2, rank_offset=1)
    facts: Facts = {"silent": await refusal(lambda: engine.join(transfer, layouts)), "before": before}
    script, weights = Path(__file__).with_name("gloo_trainer.py"), Path(sys.argv[1]) / MODEL_FILE
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(port), str(weights), stdout=asyncio.subprocess.PIPE
    )
    assert trainer.stdout is not None
    assert await trainer.stdout.readline() == b"listens\n"
    await engine.join(transfer, layouts)
    await engine.leave()
    facts["left"] = await answer("left")
    await engine.join(transfer, layouts)
    facts["joined"] = await answer("joined")
    await engine.pause("keep", clear_cache=True)
    await engine.receive()
    await engine.leave()
    await engine.leave()
    await engine.resume()
    return facts | {"received": await answer("received"), "trainer": await trainer.wait()}


SCENARIOS = (capabilities, beside, scores, cache, priority, adapters, broken_adapter, swap, gloo)


async def main(engine, work: Path) -> Facts:
    await engine.connected()
    facts = {}
    for scenario in SCENARIOS:
        began = time.monotonic()
        facts[scenario.__name__] = await scenario(engine, work)
        print(f"{scenario.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    await engine.close()
    return facts


if __name__ == "__main__":
    settings = ServeSettings(
        model=Path(sys.argv[1]),
        device="cpu",
        max_model_len=CONTEXT,
        max_num_seqs=SLOTS,
        max_loras=2,
        max_lora_rank=8,
        offer_gloo=True,
    )
    with tempfile.TemporaryDirectory() as sockets:
        os.environ.update(settings.environment(Path(sockets)))
        front_watch.name_front()
        started, _ = start_engine(settings, read_model_folder(settings.model))
        print(json.dumps(asyncio.run(main(started, Path(sys.argv[2])))), flush=True)
