"""Which GPUs each started server sees."""

from __future__ import annotations

import os
from typing import Any

import torch


def server_gpus(cfg: Any, index: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES for server `index`.

    With `trainer.placement.colocate_all` servers start at the policy's first GPU, else after its last. ValueError where
    the machine has too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    place, engine = cfg.trainer.placement, cfg.generator.inference_engine
    first = 0 if place.colocate_all else place.policy_num_gpus_per_node
    width = engine.gpus_per_server
    mine = names[first + index * width : first + (index + 1) * width]
    if len(mine) < width:
        raise ValueError(
            f"server {index} needs {width} of this machine's {len(names)} GPUs from number {first + index * width} on: "
            f"lower generator.inference_engine.num_engines={engine.num_engines} or tensor_parallel_size={width}, or "
            f"share the policy's GPUs with trainer.placement.colocate_all=true"
        )
    return ",".join(mine)
