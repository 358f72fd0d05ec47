"""One rank of the FSDP2 backend: a transformers model, AdamW, and how its full weights leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from skyrl.train.algorithms.logprobs import token_logprobs
from skyrl.train.policy import lora
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import Role, WorkerPlace
from skyrl.train.policy.fsdp import checkpoint
from skyrl.train.policy.fsdp.model import build_model
from skyrl.train.policy.fsdp.optimizer import build_optimizer, clipped_step
from skyrl.train.policy.fsdp.rows import HeadSelection, to_rows, token_values
from skyrl.train.policy.value_model import ValueModel


class FsdpBackend:
    """See `policy.contract.PolicyBackend`."""

    def __init__(
        self, model: PreTrainedModel | ValueModel, place: WorkerPlace, cfg: Any, role: Role, *, total_steps: int
    ) -> None:
        self.place, self.model = place, model
        self.adapter = lora.adapter_spec(cfg, role)
        self._head = HeadSelection(model.get_output_embeddings())
        self._block, self._seed = cfg.trainer.logprobs_chunk_size, cfg.trainer.seed
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer: AdamW | None = None
        self._schedule: LRScheduler | None = None
        if role != "ref":
            optimizer_config = getattr(cfg.trainer, role).optimizer_config
            self._max_grad_norm = optimizer_config.max_grad_norm
            self._optimizer, self._schedule = build_optimizer(
                self._parameters, optimizer_config, total_steps=total_steps, role=role
            )

    def token_logprobs(
        self, micro: TrajectoryBatch, *, temperature: float, with_entropy: bool, grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.model.train(grad)
        with torch.set_grad_enabled(grad):
            rows = to_rows(micro)
            logits_TV = self._head.logits(self.model, rows)
            return token_logprobs(
                logits_TV, rows.labels_T, temperature=temperature, with_entropy=with_entropy, block=self._block
            )

    def token_values(self, micro: TrajectoryBatch, *, grad: bool) -> torch.Tensor:
        self.model.train(grad)
        with torch.set_grad_enabled(grad):
            return token_values(self._head.logits(self.model, to_rows(micro)))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> tuple[float, float]:
        assert self._optimizer is not None and self._schedule is not None, "a reference has no optimizer"
        return clipped_step(self._parameters, self._optimizer, self._schedule, max_grad_norm=self._max_grad_norm)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On one rank without sharding these are the live weights: read them before the next step."""
        return self._export(lambda tensor: tensor)

    def export_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, factor in lora.factors(self.model):
            yield name, self._full(factor)

    def export_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.adapter is None:
            yield from self._export(lambda tensor: tensor.grad)
            return
        for name, parameter in lora.trained(self.model):
            if parameter.grad is not None:
                yield name, self._full(parameter.grad)

    def save(self, folder: Path) -> None:
        assert self._optimizer is not None and self._schedule is not None, "a reference has nothing to resume"
        checkpoint.save(folder, self.place, self.model, self._optimizer, self._schedule)

    def load(self, folder: Path) -> list[str]:
        assert self._optimizer is not None and self._schedule is not None, "a reference has nothing to resume"
        return checkpoint.load(folder, self.place, self.model, self._optimizer, self._schedule, seed=self._seed)

    def save_weights(self, folder: Path) -> None:
        checkpoint.save_weights(folder, self.place, self.model)

    def load_weights(self, folder: Path) -> None:
        checkpoint.load_weights(folder, self.place, self.model)

    def save_hf(self, folder: Path) -> None:
        full = {name: self._full(tensor) for name, tensor in self._base_tensors()}
        factors = dict(self.export_adapter())
        if self.place.rank == 0:
            lora.save_hf(folder, self.model, full, factors, self.adapter)
        dist.barrier()

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.place.device)

    def close(self) -> None:
        self._optimizer = self._schedule = None
        del self.model

    def _export(self, part: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        conversions = getattr(self.model, "_weight_conversions", None)
        for name, tensor in self._base_tensors():
            value = part(tensor)
            if value is None:
                continue
            full = self._full(value)
            # some architectures hold tensors under other names or fused; the checkpoint's own are what servers know
            named = revert_weight_conversion(self.model, {name: full}) if conversions else {name: full}
            yield from named.items()

    def _base_tensors(self) -> list[tuple[str, torch.Tensor]]:
        tensors = checkpoint.unique_tensors(self.model)
        return tensors if self.adapter is None else lora.base_tensors(tensors)

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor on the CPU of rank 0; the others take part in gathering it and keep nothing."""
        tensor = tensor.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.cpu() if self.place.rank == 0 else torch.empty(0)

    def _move(self, device: torch.device) -> None:
        if self.place.device.type == "cpu":
            return
        self.model.to(device)
        for slot in self._optimizer.state.values() if self._optimizer is not None else ():
            for name, value in slot.items():
                if isinstance(value, torch.Tensor):
                    slot[name] = value.to(device)
        torch.cuda.empty_cache()


def build(cfg: Any, place: WorkerPlace, role: Role, *, total_steps: int) -> FsdpBackend:
    """The policy factory of this backend."""
    return FsdpBackend(build_model(cfg, place, role), place, cfg, role, total_steps=total_steps)
