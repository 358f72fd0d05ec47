"""Which low-rank adapters are loaded, under which number vLLM knows them, and what this model can take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from skyrl_rollout.errors import UnknownPolicy
from skyrl_rollout.server.engine import Adapter
from skyrl_rollout.weights.manifest import TensorLayout

PEFT_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterBook:
    """modules: name -> (outputs, inputs) of every linear layer that can have an adapter."""

    def __init__(self, modules: Mapping[str, tuple[int, int]], *, max_adapters: int, max_rank: int, dtype: str) -> None:
        self._modules, self._max_adapters, self._max_rank, self._dtype = modules, max_adapters, max_rank, dtype
        self._numbers: dict[str, int] = {}
        self._last_number = 0

    def check(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        """Raises ValueError for a rank, module, shape or dtype that this model cannot take, or one adapter too many."""
        if not 1 <= adapter.rank <= self._max_rank:
            raise ValueError(f"the adapter's rank is {adapter.rank}, this server takes 1 to {self._max_rank}: see "
                             f"--max-lora-rank")  # fmt: skip
        if not 0 < abs(adapter.alpha) < float("inf"):
            raise ValueError(f"the adapter's alpha is {adapter.alpha:g}, expected a finite number that is not 0")
        if adapter.policy_id not in self._numbers and len(self._numbers) >= self._max_adapters:
            held = ", ".join(sorted(self._numbers)[:5])
            raise ValueError(
                f"{len(self._numbers)} adapters are loaded ({held}), the limit is {self._max_adapters}: drop one, or "
                f"start the server with more --max-loras"
            )
        self._check_tensors(adapter, tensors)

    def _check_tensors(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        sides: dict[str, set[str]] = {}
        for t in tensors:
            named = PEFT_NAME.fullmatch(t.name)
            size = self._modules.get(named["module"]) if named else None
            if named is None or size is None:
                raise ValueError(
                    f"{t.name} belongs to no linear layer of this model: expected "
                    f"base_model.model.<module>.lora_A.weight and ...lora_B.weight, such as <module> = "
                    f"{next(iter(sorted(self._modules)), 'none')}"
                )
            shape = (adapter.rank, size[1]) if named["side"] == "A" else (size[0], adapter.rank)
            if t.shape != shape or t.dtype != self._dtype:
                raise ValueError(f"{t.name} is {t.dtype} {t.shape}, expected {self._dtype} {shape}")
            sides.setdefault(named["module"], set()).add(named["side"])
        halves = sorted(module for module, found in sides.items() if found != {"A", "B"})
        if halves or not sides:
            raise ValueError(f"lora_A or lora_B is missing for {', '.join(halves[:5]) or 'every module'}: send both")
        targets = {module.rpartition(".")[2] for module in sides}
        if adapter.target_modules and (unknown := sorted(set(adapter.target_modules) - targets - set(sides))):
            raise ValueError(f"target_modules names {', '.join(unknown[:5])}, for which there is no tensor")

    def number(self, policy_id: str) -> int:
        """The number under which vLLM holds this policy; a new one for a new policy."""
        if policy_id not in self._numbers:
            self._last_number += 1
            self._numbers[policy_id] = self._last_number
        return self._numbers[policy_id]

    def forget(self, policy_id: str) -> int | None:
        """The number that is free to go; None for an unknown policy."""
        return self._numbers.pop(policy_id, None)

    def loaded(self, policy_id: str) -> int:
        """The number of an adapter that was loaded. Raises UnknownPolicy: no request falls back to the base."""
        if policy_id not in self._numbers:
            raise UnknownPolicy(f"policy {policy_id!r} is not loaded: publish its adapter first")
        return self._numbers[policy_id]


def adapter_sizes(modules: Sequence[str], tensors: Sequence[TensorLayout]) -> dict[str, tuple[int, int]]:
    """module -> (outputs, inputs), for the modules that the checkpoint has under the same name."""
    shapes = {t.name: t.shape for t in tensors}
    found = {module: shapes.get(f"{module}.weight", ()) for module in modules}
    return {module: (shape[0], shape[1]) for module, shape in found.items() if len(shape) == 2}
