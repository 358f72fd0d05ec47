"""A model with a low-rank adapter beside some of its weights: which tensors are whose, under which names, and merged.

The adapter is PEFT's; `peft_adapter` puts it into the model. Nothing here imports PEFT: runs without one need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from skyrl.train.policy import hf_files
from skyrl.train.policy.contract import AdapterSpec, Role
from skyrl.train.policy.value_model import ValueModel

NAME = "default"  # of the adapter inside the model
PREFIX, BASE_LAYER, FACTORS = "base_model.model.", ".base_layer.", (f".lora_A.{NAME}.", f".lora_B.{NAME}.")


def adapter_spec(cfg: Any, role: Role) -> AdapterSpec | None:
    """What is trained instead of the role's weights; None where LoRA is off, and for a reference, which is frozen."""
    if role == "ref":
        return None
    lora = getattr(cfg.trainer, role).model.lora
    return AdapterSpec(lora.rank, float(lora.alpha)) if lora.rank else None


def add_adapter(model: PreTrainedModel | ValueModel, cfg: Any, role: Role) -> None:
    """Puts the role's adapter into the model and freezes everything else but a value head; nothing where LoRA is
    off."""
    if adapter_spec(cfg, role) is not None:
        from skyrl.train.policy import peft_adapter  # importing PEFT costs seconds: only where it is needed

        peft_adapter.inject(model, cfg, role)


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is A or B of an adapter."""
    return any(factor in name for factor in FACTORS)


def factors(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A and B of every adapted module, under the names by which PEFT saves them, in one order on every rank."""
    found = [(name, p) for name, p in model.named_parameters() if is_factor(name)]
    return [(PREFIX + name.replace(f".{NAME}.", "."), p) for name, p in found]


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What the optimizer updates beside an adapter too (a value head), in the model's order; factors as PEFT names
    them."""
    names = {id(p): name for name, p in factors(model)}
    return [(names.get(id(p), name), p) for name, p in model.named_parameters() if p.requires_grad]


def base_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Of a model's tensors those that are not the adapter's, under the names that the model has without one."""
    return [(name.replace(BASE_LAYER, "."), tensor) for name, tensor in tensors if not is_factor(name)]


def merged(
    base: Iterable[tuple[str, torch.Tensor]], factors: Mapping[str, torch.Tensor], adapter: AdapterSpec
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's tensors with W + (alpha / rank) * B @ A in place of each adapted W (arXiv 2106.09685, section 4.1),
    computed in at least float32.

    base: under the model's own names; factors: as PEFT saves them.
    """
    for name, weight in base:
        module = PREFIX + name.removesuffix(".weight")
        a, b = (factors.get(f"{module}.lora_{side}.weight") for side in "AB")
        if a is None or b is None:
            yield name, weight
            continue
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = (b.to(wide) @ a.to(wide)) * (adapter.alpha / adapter.rank)
        yield name, (weight.to(wide) + change).to(weight.dtype)


def save_hf(
    folder: Path,
    model: PreTrainedModel | ValueModel,
    base: Mapping[str, torch.Tensor],
    factors: Mapping[str, torch.Tensor],
    adapter: AdapterSpec | None,
) -> None:
    """A checkpoint that transformers loads: the base with the adapter merged in, and beside it the adapter itself in
    `lora_adapter/`, as `PeftModel.from_pretrained` loads it. Without an adapter, the base alone."""
    whole = base if adapter is None else dict(merged(base.items(), factors, adapter))
    hf_files.write(folder, model, dict(whole))
    if adapter is not None:
        from skyrl.train.policy import peft_adapter  # as above

        peft_adapter.save(folder, model, factors)
