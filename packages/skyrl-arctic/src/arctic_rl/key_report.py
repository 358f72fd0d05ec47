"""What the Arctic trainer does with each key that the user set: honoured, mapped, unused or refused, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from skyrl.train.backends import KeyReport

from arctic_rl.client_config import Device, attention, compute_dtype, resolve_device, zero_stage
from arctic_rl.mapping import ENGINE, ENGINE_ARGUMENTS, SHARED_NAMES

OWN = "trainer.arctic_rl."
POLICY_FSDP = "trainer.policy.fsdp_config."
TRAINED = ("policy", "critic")

# Keys of the fsdp backend that DeepSpeed's own settings replace.
UNUSED = {
    "trainer.strategy": "it names the fsdp backend's sharding; here trainer.arctic_rl.zero_stage does",
    **{
        f"trainer.{role}.fsdp_config.{name}": why
        for role in TRAINED
        for name, why in {
            "cpu_offload": "use trainer.arctic_rl.offload_optimizer and offload_param",
            "reshard_after_forward": "ZeRO stage 3 always frees gathered parameters",
            "fsdp_size": "ZeRO shards over all workers",
            "wrap_policy": "ZeRO shards parameter by parameter",
            "mixed_precision.buffer_dtype": "buffers keep the dtype in which they were built",
        }.items()
    },
    f"{OWN}cuda_ipc_weight_sync": "weights go through the rollout protocol: shared memory on one host, else gRPC",
    f"{OWN}low_memory_weight_sync": "weights are always streamed tensor by tensor",
    f"{OWN}drop_position_ids": "positions are always derived from the sequence lengths",
    f"{OWN}host": f"the server's address is {ENGINE}.external_server_urls",
    f"{OWN}port": f"the server's address is {ENGINE}.external_server_urls",
    f"{OWN}server_logs": "server logs are always in trainer.log_path",
    f"{OWN}use_zorro": "each sample carries its own prompt; the gradients are the same",
    f"{OWN}use_arctic_inference": "the server is told at its own command line",
    f"{OWN}colocate": "policy and server do not take turns on a device: give each its own (CUDA_VISIBLE_DEVICES)",
    **{
        f"trainer.{role}.optimizer_config.offload_after_step": "optimizer state stays where offload_optimizer puts it"
        for role in TRAINED
    },
}

UNUSED_ON_CPU = {
    "trainer.bf16": "bfloat16 is emulated on CPU, ten times slower and less exact: weights and compute are float32",
    **{
        f"trainer.{role}.fsdp_config.mixed_precision.{name}": "weights and compute are float32 on CPU"
        for role in TRAINED
        for name in ("param_dtype", "reduce_dtype")
    },
    f"{OWN}offload_optimizer": "optimizer state lies in host memory anyway",
    f"{OWN}offload_param": "parameters lie in host memory anyway",
}

# trainer.arctic_rl.<name> -> (which values cannot be honoured, what to do instead).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "log_prob_gpus": (lambda n: n > 0, "leave it out: the policy's own workers compute logprobs"),
    "ulysses_sequence_parallel_size": (lambda n: n > 1, "leave it out: sequences are not split over devices"),
    "use_liger": (bool, "leave it out: liger kernels are not installed with this package"),
    "arctic_inference_config": (bool, "leave it out: features are switched on at the server's command line"),
}


def report(cfg: Any, user_keys: tuple[str, ...]) -> KeyReport:
    """One verdict per key in `user_keys`; a key that no rule names is honoured."""
    device = resolve_device(cfg.trainer.device)
    unused = UNUSED | (UNUSED_ON_CPU if device == "cpu" else {}) | idle(cfg)
    refusals = refused(cfg, device)
    mappings = mapped(cfg, device)

    def among(rules: dict[str, str]) -> dict[str, str]:
        return {key: rules[rule] for key in user_keys if (rule := _rule_for(key, rules)) is not None}

    out_refused, out_mapped, out_unused = among(refusals), among(mappings), among(unused)
    out_mapped = {key: text for key, text in out_mapped.items() if key not in out_refused}
    out_unused = {key: text for key, text in out_unused.items() if key not in out_refused and key not in out_mapped}
    named = out_refused.keys() | out_mapped.keys() | out_unused.keys()
    return KeyReport(
        honoured=tuple(key for key in user_keys if key not in named),
        mapped=out_mapped,
        unused=out_unused,
        refused=out_refused,
    )


def refused(cfg: Any, device: Device) -> dict[str, str]:
    """Keys whose present value cannot be honoured, with what to do."""
    arctic, out = cfg.trainer.arctic_rl, {}
    for name, (cannot, instead) in REFUSED.items():
        if cannot(getattr(arctic, name)):
            out[OWN + name] = instead
    for name in ("logits_compute_from_fp32_inputs", "logits_compute_in_fp32"):
        if getattr(arctic, name) and compute_dtype(cfg, device) != torch.float32:
            out[OWN + name] = "set trainer.bf16=false, which computes everything in float32"
    return out


def idle(cfg: Any) -> dict[str, str]:
    """Keys that another key leaves nothing to decide."""
    arctic, out = cfg.trainer.arctic_rl, {}
    if not arctic.determinism_full:
        out[f"{OWN}determinism_seed"] = "read with determinism_full=true only; trainer.seed decides otherwise"
    if arctic.logits_optimization in (None, "none"):
        out[f"{OWN}logits_optimization_peak_mem_size_in_gib"] = "read with logits_optimization=memory only"
    return out


def mapped(cfg: Any, device: Device) -> dict[str, str]:
    """Keys that become something else, with what they become."""
    out = {OWN + name: path for name, path in SHARED_NAMES.items()}
    out |= {OWN + name: f"{ENGINE}.engine_init_kwargs.{argument}" for name, argument in ENGINE_ARGUMENTS.items()}
    out[f"{OWN}vllm_config"] = f"{ENGINE}.engine_init_kwargs"
    for name in ("speculative_model", "num_speculative_tokens"):
        out[OWN + name] = f"{ENGINE}.engine_init_kwargs.speculative_config (none without a speculative_model)"
    out[f"{OWN}lr_warmup_ratio"] = "trainer.policy.optimizer_config.num_warmup_steps"
    out["trainer.flash_attn"] = "torch's scaled_dot_product_attention, which picks the flash kernel on CUDA"
    asked = cfg.trainer.arctic_rl.attn_implementation
    if attention(cfg, device) != asked:
        out[f"{OWN}attn_implementation"] = f"{attention(cfg, device)}: {asked} needs a GPU"
    stage = zero_stage(cfg, compute_dtype(cfg, device))
    if stage != cfg.trainer.arctic_rl.zero_stage:
        out[f"{OWN}zero_stage"] = f"stage {stage}: bfloat16 weights need the float32 copies that it keeps"
    return out


def _rule_for(key: str, rules: dict[str, str]) -> str | None:
    """The rule with this key's name or, for a free mapping, with the name of the section that it lies in."""
    return next((rule for rule in rules if key == rule or key.startswith(rule + ".")), None)
