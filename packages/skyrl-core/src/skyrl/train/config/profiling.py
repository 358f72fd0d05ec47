"""When a worker's profile is taken and what it holds (`trainer.policy.torch_profiler_config.*`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from skyrl.train.config.part import ConfigPart, Texts, key

Ranks = Annotated[tuple[int, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class TorchProfilerConfig(ConfigPart):
    """`trainer.policy.torch_profiler_config.*`."""

    enable: bool = key(False, "Take a profile of the policy's workers; only false is possible here.")
    ranks: Ranks = Field((0,), description="Workers that take one.")
    save_path: str | None = key(None, "Folder of the profiles.")
    skip_first: int = key(10, "Steps before the first cycle.", ge=0)
    wait: int = key(0, "Idle steps of a cycle.", ge=0)
    warmup: int = key(1, "Warm-up steps of a cycle.", ge=0)
    active: int = key(1, "Recorded steps of a cycle.", ge=1)
    repeat: int = key(1, "Cycles; 0: to the end.", ge=0)
    activities: Texts = Field(("cpu", "cuda"), description="What is recorded.")
    record_shapes: bool = key(True, "Record the shapes of tensors.")
    profile_memory: bool = key(False, "Record allocations.")
    with_stack: bool = key(True, "Record call stacks.")
    with_flops: bool = key(False, "Estimate floating-point operations.")
    with_modules: bool = key(False, "Record module names.")
    export_type: str = key("chrome_trace", "File format.")
