"""Low-rank adapters beside the base weights: W x + (alpha / rank) B A x, for the rows of one policy at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from skyrl_rollout.server.engine import Adapter
from skyrl_rollout.weights.manifest import TensorLayout

from skyrl.train.policy.publishing import TORCH_DTYPES

PREFIX, SUFFIXES = "base_model.model.", {"A": ".lora_A.weight", "B": ".lora_B.weight"}


@dataclass
class LowRank:
    """a: [rank, in], b: [out, rank]; scale is alpha / rank."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class Adapters:
    """Those that are loaded. Within `used(policy_id)` the model's linear layers add that adapter's part."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._linears = {name: m for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)}
        self._loaded: dict[str, dict[str, LowRank]] = {}
        self._hooks: dict[str, Any] = {}
        self._active: dict[str, LowRank] = {}

    def check(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        """Raises ValueError for a rank, module or tensor that this model cannot take."""
        shapes = {t.name: t.shape for t in tensors}
        for name, (module, half) in {name: _parsed(name) for name in shapes}.items():
            linear = self._linears.get(module)
            if linear is None or not module.endswith(tuple(adapter.target_modules)):
                raise ValueError(f"{name}: the model has no linear layer {module} among target_modules")
            expected = {"A": (adapter.rank, linear.in_features), "B": (linear.out_features, adapter.rank)}[half]
            if shapes[name] != expected:
                raise ValueError(f"{name} has shape {list(shapes[name])}, expected {list(expected)}")
            other = PREFIX + module + SUFFIXES["B" if half == "A" else "A"]
            if other not in shapes:
                raise ValueError(f"{name} comes without {other}")

    def load(self, adapter: Adapter, tensors: Iterable[tuple[TensorLayout, memoryview]]) -> None:
        """Takes the place of an older version of that policy."""
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for layout, data in tensors:
            module, half = _parsed(layout.name)
            weight = self._linears[module].weight
            flat = torch.frombuffer(data, dtype=torch.uint8).view(TORCH_DTYPES[layout.dtype])
            halves.setdefault(module, {})[half] = flat.view(layout.shape).to(weight.device, weight.dtype, copy=True)
        scale = adapter.alpha / adapter.rank
        self._loaded[adapter.policy_id] = {m: LowRank(h["A"], h["B"], scale) for m, h in halves.items()}
        self._hook()

    def drop(self, policy_id: str) -> None:
        """Unknown id: no-op."""
        if self._loaded.pop(policy_id, None) is not None:
            self._hook()

    @contextmanager
    def used(self, policy_id: str) -> Iterator[None]:
        """ "" is the base, without any adapter."""
        self._active = self._loaded[policy_id] if policy_id else {}
        try:
            yield
        finally:
            self._active = {}

    def _hook(self) -> None:
        """Only layers that an adapter changes pay for one."""
        needed = {module for parts in self._loaded.values() for module in parts}
        for module in set(self._hooks) - needed:
            self._hooks.pop(module).remove()
        for module in needed - set(self._hooks):
            self._hooks[module] = self._linears[module].register_forward_hook(self._adding(module))

    def _adding(self, module: str) -> Any:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            part = self._active.get(module)
            if part is None:
                return None
            return output + part.scale * (inputs[0] @ part.a.T @ part.b.T)

        return add


def _parsed(name: str) -> tuple[str, str]:
    """(module, "A" or "B") of a tensor's name as PEFT saves it."""
    for half, suffix in SUFFIXES.items():
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix), half
    raise ValueError(f"{name}: expected {PREFIX}<module>.lora_A.weight or ...lora_B.weight")
