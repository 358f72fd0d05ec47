"""How vLLM is started: in which process, with which arguments, and what is said when it does not start."""

from __future__ import annotations

import difflib
import os
import time
from dataclasses import fields
from typing import TYPE_CHECKING

from pydantic import ValidationError

from skyrl_arctic_inference import front_watch
from skyrl_arctic_inference.engine.identity import ModelFolder
from skyrl_arctic_inference.settings import ServeSettings

if TYPE_CHECKING:
    from skyrl_arctic_inference.engine.vllm_engine import VllmEngine


class EngineStartError(RuntimeError):
    """vLLM refused its configuration or its process died while starting; the message is one line."""


def start_engine(settings: ServeSettings, folder: ModelFolder) -> tuple[VllmEngine, dict[str, float]]:
    """Blocks until the model answers; returns it and the seconds spent importing vLLM and starting its process.

    Call it in the main thread, outside an event loop and before gRPC is used: the engine's process may be forked.
    Raises EngineStartError.
    """
    began = time.monotonic()
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would silently win over --kv-cache-gib
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from skyrl_arctic_inference.engine.core_calls import add_core_calls
    from skyrl_arctic_inference.engine.steps import StepObserver
    from skyrl_arctic_inference.engine.vllm_engine import VllmEngine

    imported = time.monotonic()
    arguments = settings.engine_arguments(folder)
    _refuse_unknown(settings.engine_args, known=[f.name for f in fields(AsyncEngineArgs)])
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        raise EngineStartError(f"vLLM refuses this model or configuration: {one_line(error)}") from None
    if settings.forks_engine:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM asked for spawn, which imports everything again
    add_core_calls()
    unwatch = front_watch.watch_forks(lambda: os.sched_setaffinity(0, settings.engine_cores))
    try:
        llm = AsyncLLM(config, executor_class=Executor.get_class(config), log_stats=True, log_requests=False)
    except (RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise EngineStartError(f"the engine did not start: {one_line(error)}") from None
    finally:
        unwatch()
    llm.logger_manager, llm.log_stats = None, False  # the scheduler's own statistics are all that is read
    steps = StepObserver(llm.tokenizer, log_stats=False, stream_interval=1)
    llm.output_processor = steps
    engine = VllmEngine(llm, steps, folder, on_cpu=settings.device == "cpu", offers_gloo=settings.offer_gloo)
    return engine, {"import": imported - began, "engine": time.monotonic() - imported}


def one_line(error: BaseException) -> str:
    """The sentence of an error that says what is wrong."""
    if isinstance(error, ValidationError):
        return "; ".join(str(e["msg"]).removeprefix("Value error, ").splitlines()[0] for e in error.errors()[:3])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _refuse_unknown(given: dict[str, object], *, known: list[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise EngineStartError(f"--engine-arg {name}: vLLM has no such engine argument{hint}")
