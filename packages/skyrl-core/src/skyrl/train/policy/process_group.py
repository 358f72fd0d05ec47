"""Where a worker process runs: its device, its threads, and the process group it shares with the other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyrl.train.policy.contract import WorkerPlace

COLLECTIVE_TIMEOUT_S = 1800.0

_users_in_process = 0


def resolve_device(cfg: Any) -> str:
    """ "cuda" or "cpu" from trainer.device. ValueError when a GPU is asked for and there is none."""
    wanted = cfg.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but torch sees no GPU: set trainer.device=cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def join_alone(cfg: Any) -> WorkerPlace:
    """A process group of this process only, shared by all groups in it; leave it with `leave_alone`."""
    global _users_in_process
    device = torch.device("cuda", 0) if resolve_device(cfg) == "cuda" else torch.device("cpu")
    if not dist.is_initialized():
        limit_cpu_threads(device.type, workers=1)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            _collectives(device.type),
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    _users_in_process += 1
    return WorkerPlace(rank=0, world_size=1, device=device)


def leave_alone() -> None:
    """Ends the process group when the last group in this process leaves it."""
    global _users_in_process
    _users_in_process -= 1
    if _users_in_process == 0 and dist.is_initialized():
        dist.destroy_process_group()


def join_others(device_type: str, *, rank: int, world_size: int, init_method: str) -> WorkerPlace:
    """This process as one rank among others. Each sees its own GPU as device 0."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _collectives(device_type),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return WorkerPlace(rank=rank, world_size=world_size, device=device)


def limit_cpu_threads(device_type: str, *, workers: int) -> None:
    """Half the cores, shared by the workers, unless OMP_NUM_THREADS says otherwise: the rollout server has the rest,
    and two OpenMP pools that spin on the same cores stop each other."""
    if device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (2 * workers)))


def worker_environ(cfg: Any, plugin: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """What every worker process finds: the plugin's variables and, above them, the driver's with its prefixes."""
    own = plugin.worker_environ(cfg) if plugin.worker_environ is not None else {}
    return own | {name: value for name, value in environ.items() if name.startswith(plugin.environ_prefixes)}


def _collectives(device_type: str) -> str:
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
