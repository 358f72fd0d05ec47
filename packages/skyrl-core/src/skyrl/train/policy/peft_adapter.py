"""How a model gets a low-rank adapter to train, and how one is saved: the one home of PEFT.

Only what PEFT does without touching the base weights; nothing is merged while a model trains.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from skyrl.train.config.lora_rules import ALL_LINEAR, INIT_METHODS
from skyrl.train.config.problems import listed
from skyrl.train.policy.contract import Role
from skyrl.train.policy.lora import NAME, is_factor
from skyrl.train.policy.value_model import ValueModel
from skyrl.train.seeds import derive

log = logging.getLogger(__name__)

FOLDER, WEIGHTS = "lora_adapter", "adapter_model.safetensors"


def inject(model: PreTrainedModel | ValueModel, cfg: Any, role: Role) -> None:
    """Puts an adapter beside the target modules of the model's trunk and freezes everything else but a value head
    (arXiv 2106.09685).

    It is drawn from the run's seed, equal on every rank. ValueError names target modules that the model does not have.
    """
    part, trunk = getattr(cfg.trainer, role).model, trunk_of(model)
    key = f"trainer.{role}.model.lora"
    linears = [name for name, module in trunk.named_modules() if isinstance(module, nn.Linear)]
    require_known(f"{key}.target_modules", part.lora.target_modules, linears)
    require_known(f"{key}.exclude_modules", part.lora.exclude_modules, linears)
    for parameter in trunk.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(derive(cfg.trainer.seed, "lora", role))
        try:
            inject_adapter_in_model(peft_config(part.lora, part.path), trunk, adapter_name=NAME)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(is_factor(name))
    log.info("the %s trains %s", role, describe(trunk))


def trunk_of(model: PreTrainedModel | ValueModel) -> PreTrainedModel:
    """What an adapter goes into: the model, without a value head."""
    return model.trunk if isinstance(model, ValueModel) else model


def save(folder: Path, model: PreTrainedModel | ValueModel, factors: Mapping[str, torch.Tensor]) -> None:
    """`lora_adapter/` in `folder`, in PEFT's own form; factors: under the names by which PEFT saves them."""
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    config = copy.copy(trunk_of(model).peft_config[NAME])
    config.inference_mode = True
    config.save_pretrained(str(target))
    save_file({name: t.contiguous() for name, t in factors.items()}, target / WEIGHTS)


def peft_config(lora: Any, base: str) -> LoraConfig:
    """PEFT's own form of `trainer.policy.model.lora`."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_names(lora.target_modules),
        exclude_modules=_names(lora.exclude_modules),
        init_lora_weights=INIT_METHODS[lora.init_method],
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def require_known(key: str, wanted: str | Sequence[str] | None, linears: Sequence[str]) -> None:
    """ValueError unless every name ends that of a linear layer, or the regex matches one; it lists the model's own."""
    if wanted is None or wanted == ALL_LINEAR:
        return
    if isinstance(wanted, str):
        try:
            missing = [] if any(re.fullmatch(wanted, name) for name in linears) else [wanted]
        except re.error as error:
            raise ValueError(f"{key}={wanted} is no regular expression: {error}") from None
    else:
        missing = [end for end in wanted if not any(n == end or n.endswith(f".{end}") for n in linears)]
    if missing:
        ends = {name.rpartition(".")[2] for name in linears}
        raise ValueError(f"{key}: the model has no linear layer {', '.join(missing)}; {listed(missing[0], ends)}")


def describe(model: nn.Module) -> str:
    """How many numbers are trained, of how many, and where."""
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
    frozen = sum(p.numel() for p in model.parameters()) - sum(trained.values())
    return f"an adapter of {sum(trained.values()):,} numbers over {frozen:,} frozen ones: {', '.join(sorted(modules))}"


def _names(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
