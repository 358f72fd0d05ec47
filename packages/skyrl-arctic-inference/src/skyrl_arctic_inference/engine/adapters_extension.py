"""How staged bytes become a low-rank adapter inside a vLLM worker, in memory, and how the base is loaded beside one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import replace_submodule

from skyrl_arctic_inference.engine.staged_tensors import Row, staged_tensors


class AdaptersExtension:
    """Methods that `collective_rpc` calls by name in every worker."""

    model_runner: Any

    def adapter_modules(self) -> list[str]:
        """Every linear layer that can have an adapter, as the checkpoint names it. All slots are empty then."""
        manager = self.model_runner.lora_manager._adapter_manager
        for layer in manager.modules.values():
            for slot in range(manager.lora_slots):
                layer.reset_lora(slot)
        return [name for module in manager.modules for name in manager.packed_modules.get(module, [module])]

    def load_staged_adapter(self, number: int, rank: int, alpha: float, path: str, rows: Sequence[Row]) -> int:
        """Loads or replaces the adapter `number`; running requests use it from the next step on.

        path: memory to map. rows: (name, dtype, shape, offset) of every tensor, named as PEFT names them.
        """
        runner = self.model_runner
        manager = runner.lora_manager._adapter_manager
        lora = LoRAModel.from_lora_tensors(
            number,
            {name: tensor.clone() for name, tensor in staged_tensors(path, rows)},  # vLLM scales B in place
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
            device="cpu",
            dtype=runner.lora_config.lora_dtype,
        )
        manager.remove_adapter(number)
        manager.add_adapter(lora)
        manager.activate_adapter(number)
        return len(rows)

    def drop_adapter(self, number: int) -> bool:
        return bool(self.model_runner.lora_manager.remove_adapter(number))


@contextmanager
def plain_layers(runner: Any) -> Iterator[None]:
    """The model without its adapter layers meanwhile, so that parameters bear the names of the checkpoint."""
    manager = getattr(runner, "lora_manager", None)
    modules = {} if manager is None else manager._adapter_manager.modules
    layers = {n: m for n, m in modules.items() if not isinstance(m, LogitsProcessorWithLoRA)}
    model = runner.get_model()
    for name, layer in layers.items():
        replace_submodule(model, name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in layers.items():
            replace_submodule(model, name, layer)
