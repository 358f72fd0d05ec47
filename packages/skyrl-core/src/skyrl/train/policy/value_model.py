"""Which model a critic is: the trunk of a causal LM with one number per position where that has its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file


class ValueModel(nn.Module):
    """Its tensors have the names that they have in a causal LM's checkpoint, the head that of `head_name`."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear, head_name: str) -> None:
        super().__init__()
        self.config, self._head_name = trunk.config, head_name
        self._trunk_name = trunk.base_model_prefix or "model"
        if head_name == self._trunk_name:
            raise ValueError(
                f"trainer.algorithm.value_head_prefix={head_name} is the name of the model's trunk: take another"
            )
        self.add_module(self._trunk_name, trunk)
        self.add_module(head_name, head)

    @property
    def trunk(self) -> PreTrainedModel:
        return self.get_submodule(self._trunk_name)

    @property
    def _no_split_modules(self) -> Any:
        return self.trunk._no_split_modules

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        """`logits` are the values, [B, L, 1] or as many as the head is given."""
        hidden = self.trunk(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        return CausalLMOutput(logits=self.get_output_embeddings()(hidden))

    def get_output_embeddings(self) -> nn.Module:
        """The value head, which stands where a causal LM has its vocabulary."""
        return self.get_submodule(self._head_name)

    def activation_checkpointing_enable(self, options: dict[str, Any]) -> None:
        self.trunk.activation_checkpointing_enable(options)

    def set_attn_implementation(self, name: str) -> None:
        self.trunk.set_attn_implementation(name)

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor], **options: Any) -> None:
        """The checkpoint of the trunk with the head among its tensors."""
        self.trunk.save_pretrained(folder, state_dict=state_dict, **options)


def with_value_head(trunk: PreTrainedModel, path: str, head_name: str, *, seed: int) -> ValueModel:
    """The critic on this trunk. Its head is the checkpoint's `head_name`.weight where there is one, else drawn from
    N(0, 1 / (hidden size + 1)) by `seed`, so that values start near 0. ValueError for a head of another shape."""
    hidden_size = trunk.config.get_text_config().hidden_size
    stored = stored_tensor(path, f"{head_name}.weight")
    if stored is None:
        draw = torch.Generator().manual_seed(seed)
        stored = torch.randn(1, hidden_size, generator=draw) / (hidden_size + 1)
    if stored.shape != (1, hidden_size):
        raise ValueError(
            f"trainer.critic.model.path={path}: {head_name}.weight is {list(stored.shape)}, a value head here is "
            f"{[1, hidden_size]}"
        )
    head = nn.Linear(hidden_size, 1, bias=False, dtype=trunk.dtype)
    with torch.no_grad():
        head.weight.copy_(stored)
    return ValueModel(trunk, head, head_name)


def stored_tensor(path: str, name: str) -> torch.Tensor | None:
    """The tensor of that name in the safetensors of a checkpoint (a folder, or a name on the hub that is cached)."""
    file: str | None = SAFE_WEIGHTS_NAME
    if index := _file(path, SAFE_WEIGHTS_INDEX_NAME):
        file = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].get(name)
    if file is None or (found := _file(path, file)) is None:
        return None
    with safe_open(found, framework="pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118 (not a mapping)


def _file(path: str, name: str) -> str | None:
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False)
