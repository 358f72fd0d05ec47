"""The one home of DeepSpeed: starting an engine in a process group that exists, and reading whole tensors from it.

Nothing is compiled at first use: the optimizer is torch's own and the collectives are the process group's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import deepspeed.comm
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import (
    groups,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_group_in_use: dist.ProcessGroup | None = None


def start(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, ds_config: dict[str, Any]) -> DeepSpeedEngine:
    """An engine around `model` on this rank. ValueError where DeepSpeed refuses the configuration."""
    prepare()
    try:
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config, dist_init_required=False
        )
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"DeepSpeed {deepspeed.__version__} refuses the derived configuration: {error}") from error
    return engine


def prepare() -> None:
    """Ties DeepSpeed to the process group that the worker has joined, and to nothing else."""
    global _group_in_use
    assert dist.is_initialized(), "the worker joins its process group first"
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # asked for by DeepSpeed's CPU collectives only, which would compile a C++ extension for 40 s and be used nowhere
    deepspeed.ops.__compatible_ops__ = {}
    if _group_in_use is not dist.group.WORLD:
        # a group that was left earlier in this process is still cached there
        groups._release_process_group_references(group=None)
        _group_in_use = dist.group.WORLD
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)


@contextmanager
def zero_init(ds_config: dict[str, Any]) -> Iterator[None]:
    """While it is open, `from_pretrained` leaves each rank only its share of every parameter (stage 3)."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if ds_config["zero_optimization"]["stage"] < 3:
        yield
        return
    prepare()
    keep_alive = HfDeepSpeedConfig(ds_config)
    try:
        yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()


def reduce_gradients(engine: DeepSpeedEngine) -> None:
    """Averages every rank's gradients; for stage 0, whose engine leaves that to the end of a managed step."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    if gradients and gradients[0].dtype == torch.float64:
        # DeepSpeed counts float64 among no accelerator's dtypes
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    else:
        engine.allreduce_gradients()


def gathered(parameter: torch.Tensor) -> Any:
    """A context in which every rank sees the whole parameter (collective where it is sharded)."""
    if hasattr(parameter, "ds_id"):
        return deepspeed.zero.GatheredParameters([parameter])
    return nullcontext()


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that the tensor has when it is gathered."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def local_share(parameter: torch.Tensor, moment: str | None) -> torch.Tensor:
    """Stage 3: this rank's flat share of the float32 parameter, or of one of its moments, with its padding. Live, or a
    copy where the optimizer is offloaded."""
    return safe_get_local_optimizer_state(parameter, moment) if moment else safe_get_local_fp32_param(parameter)


def set_local_share(parameter: torch.Tensor, moment: str | None, values: torch.Tensor) -> None:
    """Restores what `local_share` returned, and with the parameter the share that the forward pass gathers."""
    if moment:
        safe_set_local_optimizer_state(parameter, values, moment)
        return
    safe_set_local_fp32_param(parameter, values)
    parameter.ds_tensor.data.copy_(values.view(parameter.ds_tensor.shape))  # type: ignore[attr-defined]


def mean_gradient(engine: DeepSpeedEngine, parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient accumulated so far, averaged over ranks, before any clipping (collective).

    Stages 0 and 1 keep each rank's own sum until `step`; stages 2 and 3 have reduced it already.
    """
    if engine.zero_optimization_stage() >= 2:
        return safe_get_full_grad(parameter)
    if parameter.grad is None:
        return None
    mean = parameter.grad.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@contextmanager
def boundary_for_reading(engine: DeepSpeedEngine) -> Iterator[None]:
    """Stage 2 shows gradients only past the boundary of a step; what it had accumulated is put back afterwards."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() != 2:
        yield
        return
    accumulated = dict(optimizer.all_grad_tensors)
    optimizer.finalize_gradient_accumulation_boundary()
    try:
        yield
    finally:
        optimizer.all_grad_tensors.update(accumulated)
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
        optimizer.set_gradient_accumulation_boundary(False)
