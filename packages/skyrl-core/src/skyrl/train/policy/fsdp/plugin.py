"""What the registry needs to know of the default backend."""

from __future__ import annotations

from typing import Any

from skyrl.train.backends import BackendPlugin, KeyReport

MAPPED = {
    "trainer.strategy": "FSDP2 (torch.distributed.fsdp.fully_shard)",
    "trainer.flash_attn": "torch's scaled_dot_product_attention, which picks the flash kernel on CUDA",
}
BUFFERS = "FSDP2 leaves buffers in the dtype they were built in"
OPTIMIZER = "the optimizer stays on its device: a server there keeps to gpu_memory_utilization of it"
IN_HOST_MEMORY = "weights and optimizer lie in host memory anyway"
OF_SHARDS, WHOLE = ("fsdp_size", "reshard_after_forward", "wrap_policy"), "one worker in one precision shards nothing"
ROLES = ("policy", "critic", "ref")
UNUSED = {
    **{f"trainer.{role}.optimizer_config.offload_after_step": OPTIMIZER for role in ("policy", "critic")},
    **{f"trainer.{role}.fsdp_config.mixed_precision.buffer_dtype": BUFFERS for role in ("policy", "critic", "ref")},
}
UNUSED_ON_CPU = {
    **{f"trainer.{role}.fsdp_config.cpu_offload": IN_HOST_MEMORY for role in ("policy", "critic", "ref")},
    "trainer.bf16": "bfloat16 is emulated on CPU, ten times slower and less exact: weights and compute are float32",
}


def is_whole(cfg: Any, role: str, device: str) -> bool:
    """Whether the role's one worker has nothing to gather or to cast, and so no FSDP."""
    from skyrl.train.policy.roles import num_workers  # as below

    fsdp = getattr(cfg.trainer, role).fsdp_config
    on_gpu = device == "cuda" and (cfg.trainer.bf16 or fsdp.cpu_offload)
    return num_workers(cfg, role) == 1 and fsdp.mixed_precision is None and not on_gpu


def report(cfg: Any, user_keys: tuple[str, ...]) -> KeyReport:
    """What this backend does with each key that the user set."""
    from skyrl.train.policy.process_group import resolve_device  # torch loads seconds, and listing keys needs no torch

    device = resolve_device(cfg)
    unused = UNUSED | (UNUSED_ON_CPU if device == "cpu" else {})
    mapped = {key: MAPPED[key] for key in user_keys if key in MAPPED}
    idle = {key: unused[key] for key in user_keys if key in unused}
    for role in ROLES:
        if is_whole(cfg, role, device):
            names = tuple(f"trainer.{role}.fsdp_config.{name}" for name in OF_SHARDS)
            idle |= {key: WHOLE for key in user_keys if key.startswith(names)}
    return KeyReport(
        honoured=tuple(key for key in user_keys if key not in mapped and key not in idle), mapped=mapped, unused=idle
    )


PLUGIN = BackendPlugin(name="fsdp", policy_factory="skyrl.train.policy.fsdp.backend:build", report=report)
