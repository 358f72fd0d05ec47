"""What one worker holds of weights, gradients and optimizer under each ZeRO stage, for `--check`."""

from __future__ import annotations

from typing import Any

import torch
from skyrl.train.display.memory import MASTER_BYTES, MOMENTS_BYTES, ModelSize, sharded_state
from skyrl.train.policy.roles import num_workers

from arctic_rl.client_config import compute_dtype, resolve_device, zero_stage

# The lowest stage that divides each among the workers (DeepSpeed's ZeRO, arXiv 1910.02054).
DIVIDED_FROM = {"weights": 3, "gradients": 2, "optimizer": 1}


def state_memory(cfg: Any, role: str, size: ModelSize) -> dict[str, float]:
    """Bytes by name. The reference is sharded as on the fsdp backend."""
    if role == "ref":
        return sharded_state(cfg, role, size)
    arctic, dtype = cfg.trainer.arctic_rl, compute_dtype(cfg, resolve_device(cfg.trainer.device))
    low_precision = dtype == torch.bfloat16 and not arctic.torch_autocast_enabled
    whole = {
        "weights": 2 if low_precision else MASTER_BYTES,
        "gradients": MASTER_BYTES,
        "optimizer": MOMENTS_BYTES + (MASTER_BYTES if low_precision else 0),
    }
    stage, workers = zero_stage(cfg, dtype), num_workers(cfg, role)
    held = {
        name: size.num_params * nbytes / (workers if stage >= DIVIDED_FROM[name] else 1)
        for name, nbytes in whole.items()
    }
    if arctic.offload_optimizer:
        held["optimizer in host memory"] = held.pop("optimizer")
    if arctic.offload_param:
        held["weights in host memory"] = held.pop("weights")
    return held
