"""Whether this run computes on CPU or on GPUs."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

Device = Literal["cpu", "cuda"]


def device_of(cfg: Any) -> Device:
    """`trainer.device`, where auto means GPUs if there are any. ValueError where cuda is asked for and there is none."""
    asked = cfg.trainer.device
    if asked == "cpu":
        return "cpu"
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise ValueError(f"trainer.device=cuda: torch sees no GPU{hint}; leave it out to train on CPU")
    return "cuda" if available else "cpu"


def server_dtype(cfg: Any) -> str:
    """`generator.inference_engine.model_dtype`, where auto is float32 on CPU and bfloat16 on GPUs."""
    dtype = cfg.generator.inference_engine.model_dtype
    if dtype != "auto":
        return dtype
    return "float32" if device_of(cfg) == "cpu" else "bfloat16"
