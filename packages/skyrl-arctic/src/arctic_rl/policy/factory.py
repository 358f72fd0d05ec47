"""The policy factory of the backend: it readies the process for DeepSpeed, then imports it.

DeepSpeed picks its accelerator when it is imported, so the choice has to stand in the environment before.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from skyrl.train.policy.contract import PolicyBackend, Role, WorkerPlace

from arctic_rl.client_config import Device, build_rl_config, of_the_critic

# Where the frozen reference comes from: nothing of it is DeepSpeed's, the core shards it.
REFERENCE = "skyrl.train.policy.fsdp.backend"


def build(cfg: Any, place: WorkerPlace, role: Role, *, total_steps: int) -> PolicyBackend:
    """This rank's model: policy and critic on DeepSpeed, the reference as the core builds it.

    `total_steps` counts the optimizer steps of the run, for the schedule.
    """
    if role == "ref":
        reference: PolicyBackend = importlib.import_module(REFERENCE).build(cfg, place, role, total_steps=total_steps)
        return reference
    prepare_process(place)
    device: Device = "cuda" if place.device.type == "cuda" else "cpu"
    own = of_the_critic(cfg) if role == "critic" else cfg
    settings = build_rl_config(own, device=device, world_size=place.world_size)
    if (seed := settings.ds_worker_config["determinism_seed"]) is not None:
        torch.manual_seed(seed + place.rank)
        torch.use_deterministic_algorithms(True)
    backend = importlib.import_module("arctic_rl.policy.deepspeed_backend")
    trained: PolicyBackend = backend.DeepSpeedBackend(cfg, settings, place, role, total_steps=total_steps)
    return trained


def prepare_process(place: WorkerPlace) -> None:
    """What DeepSpeed reads from the environment of its process."""
    os.environ["DS_ACCELERATOR"] = place.device.type
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    # kernels of its own would be compiled for every GPU generation it knows
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
