"""Which cores the trainer and its servers get on a machine without GPUs.

Both use OpenMP, whose threads spin while they wait: sharing cores makes each several times slower.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

# What this process was allowed before it pinned itself.
ALLOWED = tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class CorePlan:
    """Core numbers. `servers[i]` are those of server i; servers share where there are more of them than cores."""

    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]


def plan(num_servers: int, allowed: tuple[int, ...] = ALLOWED) -> CorePlan | None:
    """Half of the cores for the servers, the rest for the trainer; None where there is one core to share."""
    if len(allowed) < 2 or num_servers < 1:
        return None
    half = len(allowed) // 2
    trainer, shared = allowed[:-half], allowed[-half:]
    each = max(1, half // num_servers)
    servers = []
    for i in range(num_servers):
        start = (i * each) % half
        servers.append(shared[start : start + each])
    return CorePlan(trainer, tuple(servers))


def pin_trainer(cores: CorePlan, *, in_process: bool = True) -> str:
    """Keeps this process, all its threads and its later children on its own cores. Returns the line for the log.

    `in_process`: whether a model computes in this process, which then uses all of its cores: models take turns.
    """
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores.trainer)
        except ProcessLookupError:
            continue  # a thread that ended meanwhile
    if in_process:
        os.environ["OMP_NUM_THREADS"] = str(len(cores.trainer))  # what torch is told in each later thread
        torch.set_num_threads(len(cores.trainer))
    shown = "; ".join(f"server {i}: {_shown(server)}" for i, server in enumerate(cores.servers))
    return f"cores: trainer {_shown(cores.trainer)}, {shown}"


def server_environ(cores: tuple[int, ...]) -> dict[str, str]:
    """Variables that keep a server's OpenMP threads on its cores."""
    return {
        "OMP_NUM_THREADS": str(len(cores)),
        "MKL_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


def _shown(cores: tuple[int, ...]) -> str:
    return ",".join(map(str, cores))
