"""What this vLLM, as it is configured, can do exactly; everything else is refused by name."""

from __future__ import annotations

from typing import Any

from skyrl_rollout.server.engine import EngineCapabilities
from skyrl_rollout.tokens import LogprobMode


def capabilities_of(config: Any, *, on_cpu: bool, has_tokenizer: bool, offers_gloo: bool) -> EngineCapabilities:
    """config: vLLM's VllmConfig. Logprobs of given tokens need vLLM's first model runner: the second has another pass.

    Sleep frees nothing on a CPU, and NCCL and CUDA IPC reach no host memory.
    """
    model = config.model_config
    vocab_size = model.get_vocab_size()
    reads_given = not config.use_v2_model_runner
    return EngineCapabilities(
        logprob_modes=(LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING),
        pause_modes=("abort", "wait", "keep"),
        kv_policies=("recompute", "retain"),
        deterministic_seed=on_cpu,  # the same logits in every batch: tests/test_generation.py
        stop_strings=has_tokenizer,
        max_top_logprobs=vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, vocab_size),
        prompt_logprobs=reads_given,
        cached_prompt_tokens=True,
        score=reads_given,
        priority=config.scheduler_config.policy == "priority",
        reset_cache=True,
        sleep_levels=("offload", "discard") if model.enable_sleep_mode and not on_cpu else (),
        lora=config.lora_config is not None,
        collectives=(() if on_cpu else ("nccl", "cuda_ipc")) + (("gloo",) if offers_gloo else ()),
    )
