"""Whether this run computes on CPU or on GPUs, and in which dtype its servers compute."""

from __future__ import annotations

from typing import Any

from skyrl.train.policy.process_group import resolve_device as device_of

__all__ = ["device_of", "server_dtype"]


def server_dtype(cfg: Any) -> str:
    """`generator.inference_engine.model_dtype`, where auto is float32 on CPU and bfloat16 on GPUs."""
    dtype = cfg.generator.inference_engine.model_dtype
    if dtype != "auto":
        return dtype
    return "float32" if device_of(cfg) == "cpu" else "bfloat16"
