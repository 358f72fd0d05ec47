"""How a seeded request draws when its prompt is computed in parts, on a CPU: not before the last part.

At the end of every part vLLM samples a token, throws it away and turns the request's generator back. torch's generator
on a CPU cannot be turned back: the engine would end there, and a drawn number would be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def hold_generators_of_cut_prompts() -> None:
    """From here on a request whose prompt is not whole draws from torch's own generator; on a GPU nothing changes."""
    if not current_platform.is_cpu():
        return
    GPUModelRunner._sample = _without_theirs(GPUModelRunner._sample)
    GPUModelRunner._bookkeeping_sync = _without_theirs(GPUModelRunner._bookkeeping_sync)  # turns back what it finds


def _without_theirs(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, during which requests with a cut prompt have no generator: see `draws.drawn`."""

    @functools.wraps(method)
    def call(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        cut = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs]).tolist()
        own = {row: generators.pop(row) for row in cut if row in generators}
        try:
            return method(runner, *args, **kwargs)
        finally:
            generators.update(own)

    return call
