"""Run in the server's environment: weights are swapped under requests whose readers lag far behind the engine.

usage: lagging_reader.py MODEL_DIR OTHER_WEIGHTS.safetensors
Prints one JSON object: per request the tokens and logprobs, how many tokens the engine had made at the pause, and how
many of them the reader had seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open
from skyrl_arctic_inference import front_watch
from skyrl_arctic_inference.engine.identity import read_model_folder
from skyrl_arctic_inference.engine.launch import start_engine
from skyrl_arctic_inference.settings import ServeSettings
from skyrl_rollout.server.engine import EngineRequest, TokensMade
from skyrl_rollout.tokens import LogprobMode, Sampling

REQUESTS, TOKENS, LAG_S = 8, 300, 0.1


async def read(engine, request: EngineRequest, seen: dict) -> None:
    async for item in engine.generate(request):
        if isinstance(item, TokensMade):
            seen["token_ids"] += item.token_ids.tolist()
            seen["logprobs"] += item.logprobs.tolist()
        await asyncio.sleep(LAG_S)


async def main(engine, other: Path) -> list[dict]:
    seen = [{"token_ids": [], "logprobs": [], "prompt": [3 + i, 4, 5, 6 + i]} for i in range(REQUESTS)]
    readers = []
    for i, s in enumerate(seen):
        sampling = Sampling(max_tokens=TOKENS, seed=i, ignore_eos=True)
        prompt = np.asarray(s["prompt"], np.int32)
        request = EngineRequest(f"r{i}", prompt, sampling, LogprobMode.TEMPERATURE, 1, "@0")
        readers.append(asyncio.create_task(read(engine, request, s)))
    while min((n for counts in engine.tokens_made().values() for n in counts), default=0) < 40:
        await asyncio.sleep(0.005)
    await engine.pause("keep", clear_cache=True)
    made = engine.tokens_made()
    for i, s in enumerate(seen):
        s["made_at_pause"], s["seen_at_pause"] = made[f"r{i}"][0], len(s["token_ids"])
    with safe_open(other, "np") as file:
        arrays = [(t, np.ascontiguousarray(file.get_tensor(t.name))) for t in engine.identity.tensors]
    await engine.load_weights((t, memoryview(a).cast("B")) for t, a in arrays)
    assert engine.tokens_made() == made
    await engine.resume()
    await asyncio.gather(*readers)
    await engine.close()
    return seen


if __name__ == "__main__":
    settings = ServeSettings(model=Path(sys.argv[1]), device="cpu", max_model_len=512)
    with tempfile.TemporaryDirectory() as sockets:
        os.environ.update(settings.environment(Path(sockets)))
        front_watch.name_front()
        started, _ = start_engine(settings, read_model_folder(settings.model))
        print(json.dumps(asyncio.run(main(started, Path(sys.argv[2])))), flush=True)
