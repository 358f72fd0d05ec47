"""vLLM without the seam: `AsyncLLM` with the engine arguments of `arctic-serve`, driven in its own process.

Runs in the server's environment and answers what `benches.seam` asks: generate these prompts, tell the seconds.
"""

import argparse
import asyncio
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

from skyrl_arctic_inference.engine.identity import read_model_folder
from skyrl_arctic_inference.front_watch import name_front, watch_forks
from skyrl_arctic_inference.settings import ServeSettings, installed_device
from skyrl_arctic_inference.socket_folder import SocketFolder

from benches.worker import answer_questions


def start(settings: ServeSettings) -> Any:
    """An `AsyncLLM` as `engine.launch` makes it, without our output processor and without statistics."""
    sockets = SocketFolder()
    os.environ.update(settings.environment(sockets.path))
    name_front()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    config = AsyncEngineArgs(**settings.engine_arguments(read_model_folder(settings.model))).create_engine_config()
    if settings.forks_engine:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    unwatch = watch_forks(lambda: os.sched_setaffinity(0, settings.engine_cores))
    llm = AsyncLLM(config, executor_class=Executor.get_class(config), log_stats=False, log_requests=False)
    unwatch()
    return llm


async def generate(llm: Any, prompts: list[list[int]], new_tokens: int, concurrent: int) -> dict[str, float]:
    """All prompts, `concurrent` at a time, ids and logprobs as arrays at the end of each: seconds and tokens."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    turn = asyncio.Semaphore(concurrent)

    async def one(number: int, prompt: list[int]) -> int:
        params = SamplingParams(
            max_tokens=new_tokens, temperature=1.0, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async with turn:
            async for output in llm.generate(tokens_input(prompt), params, f"{time.monotonic_ns()}-{number}"):
                made = output.outputs[0]
        ids = np.asarray(made.token_ids, np.int32)
        logprobs = np.asarray([made.logprobs.logprobs[i] for i in made.logprobs.start_indices], np.float32)
        assert len(ids) == len(logprobs) == new_tokens and np.isfinite(logprobs).all()
        return len(ids)

    began, cpu = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    return {
        "seconds": time.perf_counter() - began,
        "tokens": sum(counts),
        "front_cpu_s": time.process_time() - cpu,
    }


def main() -> None:
    """Start vLLM before any event loop, then answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    options = parser.parse_args()
    settings = ServeSettings(
        model=options.model, device=installed_device(), max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
    )  # fmt: skip
    llm = start(settings)
    gc.collect()
    gc.freeze()  # as arctic-serve and vLLM's own server do

    async def answer(question: dict[str, Any]) -> dict[str, float]:
        return await generate(llm, **question)

    asyncio.run(answer_questions(answer))
    llm.shutdown(timeout=0.0)
    sys.stdout.flush()
    os._exit(0)  # the interpreter takes seconds to unload torch and vLLM


if __name__ == "__main__":
    main()
