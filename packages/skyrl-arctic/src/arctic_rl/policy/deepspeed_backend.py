"""One rank of the DeepSpeed backend: a transformers model in an engine that steps only when it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from skyrl.train.algorithms.logprobs import token_logprobs
from skyrl.train.policy import lora
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import Role, WorkerPlace
from skyrl.train.policy.fsdp.checkpoint import unique_tensors
from skyrl.train.policy.fsdp.model import load_for, master_dtype
from skyrl.train.policy.fsdp.optimizer import build_optimizer
from skyrl.train.policy.fsdp.rows import HeadSelection, to_rows, token_values
from skyrl.train.policy.value_model import ValueModel
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from arctic_rl.client_config import ArcticRLClientConfig, warmup_steps
from arctic_rl.policy import engine as ds
from arctic_rl.policy import engine_checkpoint

GIB = 2**30


class DeepSpeedBackend:
    """See `policy.contract.PolicyBackend`."""

    def __init__(
        self, cfg: Any, settings: ArcticRLClientConfig, place: WorkerPlace, role: Role, *, total_steps: int
    ) -> None:
        self.place, self._seed = place, cfg.trainer.seed
        self._stage = settings.ds_config["zero_optimization"]["stage"]
        own = getattr(cfg.trainer, role).optimizer_config
        self._max_grad_norm = own.max_grad_norm
        self._block = block_of_positions(settings.ds_worker_config, cfg.trainer.logprobs_chunk_size)
        self.adapter = lora.adapter_spec(cfg, role)
        self.model = build_model(cfg, settings, role)
        optimizer_config = own.model_copy(
            update={"num_warmup_steps": warmup_steps(settings.training_config, total_steps)}
        )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer, schedule = build_optimizer(trained, optimizer_config, total_steps=total_steps, role=role)
        self.engine = ds.start(self.model, optimizer, schedule, settings.ds_config)
        self._head = HeadSelection(self.model.get_output_embeddings())

    def token_logprobs(
        self, micro: TrajectoryBatch, *, temperature: float, with_entropy: bool, grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.engine.train(grad)
        with torch.set_grad_enabled(grad):
            rows = to_rows(micro)
            logits_TV = self._head.logits(self.engine, rows)
            return token_logprobs(
                logits_TV,
                rows.labels_T,
                temperature=temperature,
                with_entropy=with_entropy,
                block=self._block(logits_TV.shape[-1]),
            )

    def token_values(self, micro: TrajectoryBatch, *, grad: bool) -> torch.Tensor:
        self.engine.train(grad)
        with torch.set_grad_enabled(grad):
            return token_values(self._head.logits(self.engine, to_rows(micro)))

    def backward(self, loss: torch.Tensor) -> None:
        if self._stage == 0:
            self.engine.set_gradient_accumulation_boundary(False)
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> tuple[float, float]:
        learning_rate = float(self.engine.get_lr()[0])
        if self._stage == 0:
            return self._step_without_zero(), learning_rate
        self.engine.step()
        return float(self.engine.get_global_grad_norm()), learning_rate

    def _step_without_zero(self) -> float:
        """Stage 0 has no norm and no skipped steps of its own."""
        self.engine.set_gradient_accumulation_boundary(True)
        ds.reduce_gradients(self.engine)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return float(norm)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Below stage 3 these are the live weights: read them before the next step."""
        for name, whole in self._gathered(self._base_tensors()):
            yield from self._as_in_checkpoint(name, whole)

    def export_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `export_weights`."""
        return self._gathered(lora.factors(self.model))

    def export_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """ValueError at stage 3 with an offloaded optimizer, which shows no gradient before the step."""
        if self._stage == 3 and self.engine.zero_offload_optimizer() is not None:
            raise ValueError(
                "gradients cannot be read with zero_stage=3 and offload_optimizer=true: turn one of them off"
            )
        with ds.boundary_for_reading(self.engine):
            for name, tensor in self._base_tensors() if self.adapter is None else lora.trained(self.model):
                gradient = ds.mean_gradient(self.engine, tensor)
                if gradient is not None:
                    yield from self._as_in_checkpoint(name, gradient)

    def save(self, folder: Path) -> None:
        engine_checkpoint.save(folder, self.place, self.engine)

    def load(self, folder: Path) -> list[str]:
        return engine_checkpoint.load(folder, self.place, self.engine, seed=self._seed)

    def save_weights(self, folder: Path) -> None:
        engine_checkpoint.save_weights(folder, self.place, self.engine)

    def load_weights(self, folder: Path) -> None:
        engine_checkpoint.load_weights(folder, self.place, self.engine)

    def save_hf(self, folder: Path) -> None:
        whole, factors = dict(self.export_weights()), dict(self.export_adapter())
        if self.place.rank == 0:
            lora.save_hf(folder, self.model, whole, factors, self.adapter)
        dist.barrier()

    def offload(self) -> None:
        if self.place.device.type != "cpu":
            self._move(self.engine.offload_states, torch.device("cpu"))

    def onload(self) -> None:
        if self.place.device.type != "cpu":
            self._move(self.engine.reload_states, self.place.device)

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.model

    def _base_tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        tensors = unique_tensors(self.model)
        return tensors if self.adapter is None else lora.base_tensors(tensors)

    def _gathered(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each one whole on rank 0's CPU."""
        for name, tensor in tensors:
            with ds.gathered(tensor):
                whole = tensor.detach()
                # a gathered parameter is gone when its context ends
                whole = whole.clone() if hasattr(tensor, "ds_id") and self.place.rank == 0 else whole
            yield name, whole.cpu() if self.place.rank == 0 else torch.empty(0)

    def _as_in_checkpoint(self, name: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole tensor on rank 0's CPU, under the checkpoint's names where the model has others or fuses some."""
        local = whole.cpu() if self.place.rank == 0 else torch.empty(0)
        if getattr(self.model, "_weight_conversions", None):
            yield from revert_weight_conversion(self.model, {name: local}).items()
        else:
            yield name, local

    def _move(self, partitioned: Callable[[], None], device: torch.device) -> None:
        """ZeRO moves its own buffers; without it model and optimizer are ordinary tensors."""
        if self._stage > 0:
            partitioned()
        else:
            self.model.to(device)
            for slot in self.engine.optimizer.state.values():
                slot.update({k: v.to(device) for k, v in slot.items() if isinstance(v, torch.Tensor)})
        torch.cuda.empty_cache()


def build_model(cfg: Any, settings: ArcticRLClientConfig, role: Role) -> PreTrainedModel | ValueModel:
    """The role's model in its master dtype; at stage 3 each rank holds its share from the start."""
    worker = settings.ds_worker_config
    with ds.zero_init(settings.ds_config):
        part = getattr(cfg.trainer, role)
        model = load_for(cfg, role, part, dtype=master_dtype(part.model_config_kwargs))
    if worker["attn_implementation"] is not None:
        model.set_attn_implementation(worker["attn_implementation"])
    if worker["enable_gradient_checkpointing"]:
        model.activation_checkpointing_enable({"use_reentrant": cfg.trainer.gradient_checkpointing_use_reentrant})
    lora.add_adapter(model, cfg, role)
    return model


def block_of_positions(worker: dict[str, Any], chunk_size: int | None) -> Callable[[int], int]:
    """How many positions' logits are widened to float32 at once, for a vocabulary of the given size.

    `logits_optimization=none` takes all; memory takes what `logprobs_chunk_size` and the peak memory both allow.
    """
    if worker["logits_optimization"] == "none":
        return lambda vocabulary: 2**62
    budget = int(worker["peak_logits_gib"] * GIB)
    return lambda vocabulary: max(1, min(chunk_size or budget, budget // (4 * vocabulary)))
