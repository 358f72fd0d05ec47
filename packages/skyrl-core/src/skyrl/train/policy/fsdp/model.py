"""Which model a worker trains: a transformers causal LM or a critic, in its master dtype, sharded over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from skyrl.train.policy import hf_files, lora
from skyrl.train.policy.contract import Role, WorkerPlace
from skyrl.train.policy.fsdp.float64 import widen_norms
from skyrl.train.policy.value_model import ValueModel, with_value_head
from skyrl.train.seeds import derive

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_KEYS = ("dtype", "torch_dtype")


def build_model(cfg: Any, place: WorkerPlace, role: Role) -> PreTrainedModel | ValueModel:
    """The role's model on the place's device, in training precision, sharded unless there is nothing to share."""
    part = getattr(cfg.trainer, role)
    precision = mixed_precision(cfg, part, place)
    dtype = master_dtype(part.model_config_kwargs)
    if role == "ref" and precision is not None:
        dtype = precision.param_dtype or dtype
    model = load_for(cfg, role, part, dtype=dtype)
    if role != "ref" and cfg.trainer.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": cfg.trainer.gradient_checkpointing_use_reentrant})
    model.requires_grad_(role != "ref")
    lora.add_adapter(model, cfg, role)
    # one rank in one precision has nothing to gather or to cast: its hooks would only cost time
    if place.world_size > 1 or precision is not None or offloads(part, place):
        shard(model, part, place, precision)
    else:
        model.to(place.device)
    return model


def load_for(cfg: Any, role: Role, part: Any, *, dtype: torch.dtype) -> PreTrainedModel | ValueModel:
    """The model that `part`, the section of a role, names: a causal LM or, for the critic, its trunk with a head."""
    path, key = part.model.path, f"trainer.{role}.model.path"
    if role != "critic":
        return load(path, dtype=dtype, overrides=part.model_config_kwargs, key=key)
    with quiet_about_heads():
        trunk = load(path, dtype=dtype, overrides=part.model_config_kwargs, key=key, kind=AutoModel)
    seed = derive(cfg.trainer.seed, "value head")
    return with_value_head(trunk, path, cfg.trainer.algorithm.value_head_prefix, seed=seed)


def load(
    path: str, *, dtype: torch.dtype, overrides: dict[str, Any], key: str, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The causal LM, or another `kind`, in `path`, on the CPU. ValueError, with `key`, for a folder that is missing or
    no checkpoint, and where its tensors are not those that its config.json declares."""
    require_model_folder(path)
    hf_files.require_whole(path, f"{key}={path}")
    transformers_logging.disable_progress_bar()
    others = {k: v for k, v in overrides.items() if k not in DTYPE_KEYS}
    # what does not fit is listed below: transformers would fill it with random numbers, or raise without a name
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        config = AutoConfig.from_pretrained(path, **others)
        model, info = kind.from_pretrained(path, config=config, dtype=dtype, attn_implementation="sdpa", **options)
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{key}={path} cannot be loaded as a causal LM: {reason}") from error
    require_all_tensors(info, f"{key}={path}")
    if dtype == torch.float64:
        widen_norms(model)
    return model


@contextmanager
def quiet_about_heads() -> Iterator[None]:
    """While it is open, transformers does not report tensors that a trunk has no place for; what is missing is ours to
    tell."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def require_all_tensors(info: dict[str, Any], where: str) -> None:
    """ValueError names the tensors that a checkpoint lacks or has in another shape; `info` is transformers' report."""
    problems = [f"{name} is not there" for name in sorted(info["missing_keys"])]
    problems += [f"{name} is {list(got)}, not {list(want)}" for name, got, want in sorted(info["mismatched_keys"])]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise ValueError(f"{where}: its tensors are not those that its config.json declares: {shown}")


def require_model_folder(path: str) -> None:
    """ValueError unless `path` is a folder with a config.json or the bare name of a model on the hub."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return
    if folder.exists():
        raise ValueError(f"model path {path} has no config.json: expected a folder written by save_pretrained")
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ValueError(f"model path {path} does not exist: expected a folder written by save_pretrained")


def master_dtype(overrides: dict[str, Any]) -> torch.dtype:
    """The dtype of weights and optimizer: float32, or what `model_config_kwargs.dtype` names."""
    name = next((overrides[k] for k in DTYPE_KEYS if k in overrides), "float32")
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"model_config_kwargs.dtype={name!r} is no floating-point dtype: try float32 or bfloat16")
    return dtype


def mixed_precision(cfg: Any, part: Any, place: WorkerPlace) -> MixedPrecisionPolicy | None:
    """What forward and gradient reduction run in, where it is not the master dtype itself."""
    chosen = part.fsdp_config.mixed_precision
    if chosen is not None:
        return MixedPrecisionPolicy(param_dtype=DTYPES[chosen.param_dtype], reduce_dtype=DTYPES[chosen.reduce_dtype])
    # bfloat16 is emulated on CPU: ten times slower, and less exact
    if cfg.trainer.bf16 and place.device.type == "cuda" and master_dtype(part.model_config_kwargs) == torch.float32:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return None


def offloads(part: Any, place: WorkerPlace) -> bool:
    """Whether shards are kept in host memory beside a device; on CPU they are nowhere else."""
    return part.fsdp_config.cpu_offload and place.device.type != "cpu"


def shard(
    model: PreTrainedModel | ValueModel, part: Any, place: WorkerPlace, precision: MixedPrecisionPolicy | None
) -> None:
    """Shards each decoder layer by itself and the rest with the root, so tied embeddings stay in one group."""
    fsdp = part.fsdp_config
    options: dict[str, Any] = {
        "mesh": device_mesh(place, fsdp.fsdp_size),
        "reshard_after_forward": fsdp.reshard_after_forward,
    }
    if precision is not None:
        options["mp_policy"] = precision
    if offloads(part, place):
        options["offload_policy"] = CPUOffloadPolicy()
    wrapped = set(fsdp.wrap_policy.get("transformer_layer_cls_to_wrap") or model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in wrapped]
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} is called {sorted(wrapped) or 'anything known'}: name its decoder "
            f"layer in fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
        )
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def device_mesh(place: WorkerPlace, fsdp_size: int) -> DeviceMesh:
    """One dimension over all ranks, or (copies, ranks per copy) with `fsdp_size`."""
    world = dist.get_world_size()
    if fsdp_size in (-1, world):
        return init_device_mesh(place.device.type, (world,), mesh_dim_names=("shard",))
    if fsdp_size < 1 or world % fsdp_size:
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size} must divide the {world} workers, or be -1")
    return init_device_mesh(place.device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("copy", "shard"))
