"""The policy as the trainer sees it: one object, whatever number of ranks computes it and wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from skyrl_rollout.weights.manifest import TensorLayout
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget

from skyrl.train.backends import BackendPlugin
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import LossSpec, Normalisers, Role
from skyrl.train.policy.minibatch import needs_present_logprobs, prepare
from skyrl.train.policy.publishing import cast_layouts
from skyrl.train.policy.roles import shape_of
from skyrl.train.policy.sharding import MicroLimits, balance, num_micro_batches
from skyrl.train.policy.shares import combine
from skyrl.train.policy.worker import forward_limits, train_limits
from skyrl.train.policy.workers import LocalWorkers, Workers


class PolicyGroup:
    """All ranks of one role. Calls block until every rank is done; one caller at a time."""

    def __init__(self, workers: Workers, *, train: MicroLimits, forward: MicroLimits) -> None:
        self._workers = workers
        self._train_limits, self._forward_limits = train, forward
        self._layout: tuple[TensorLayout, ...] | None = None
        self._adapter_layout: tuple[TensorLayout, ...] | None = None

    @classmethod
    def create(cls, cfg: Any, plugin: BackendPlugin, role: Role, *, total_steps: int = 0) -> Self:
        """Starts the role's workers: in this process when there is one, as Ray actors when there are more.

        `total_steps` counts the optimizer steps of the whole run, for the schedule.
        """
        nodes, per_node = shape_of(cfg, role)
        workers: Workers
        if nodes * per_node == 1:
            workers = LocalWorkers(cfg, plugin, role, total_steps=total_steps)
        else:
            from skyrl.train.policy.ray_group import RayWorkers  # starting Ray costs seconds: only where it is needed

            workers = RayWorkers(cfg, plugin, role, nodes=nodes, per_node=per_node, total_steps=total_steps)
        return cls(workers, train=train_limits(cfg), forward=forward_limits(cfg))

    @property
    def num_workers(self) -> int:
        return self._workers.world_size

    def logprobs(self, batch: TrajectoryBatch, *, temperature: float) -> torch.Tensor:
        """CPU [T]: log_softmax(logits / temperature) of every response token under the current weights."""
        return self._per_token("logprobs", batch, temperature)

    def update(self, minibatch: TrajectoryBatch, spec: LossSpec) -> dict[str, float]:
        """One optimizer step on one mini-batch; its metrics, all of them over the whole mini-batch."""
        arguments, normalisers = self._loss_arguments(minibatch, spec)
        return combine(self._workers.run("update", arguments)) | normalisers.known

    def gradients(self, minibatch: TrajectoryBatch, spec: LossSpec) -> dict[str, torch.Tensor]:
        """What `update` would step along, before clipping; no step is taken. For checks."""
        return self._workers.run("gradients", self._loss_arguments(minibatch, spec)[0])[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """A CPU copy of all weights under their checkpoint names, and of the adapter's under PEFT's."""
        return {name: t.clone() for name, t in self._everywhere("weights")[0].items()}

    def layout(self) -> tuple[TensorLayout, ...]:
        """Every tensor of the checkpoint, in the order in which it is published."""
        if self._layout is None:
            self._layout = self._everywhere("layout")[0]
        return self._layout

    def publish(
        self, targets: Sequence[PublishTarget], *, target_version: int, dtype: str | None, timeout_s: float
    ) -> PublishReport:
        """Rank 0 streams the weights, cast to `dtype`, to all targets (`PublishTarget`); returns its `PublishReport`
        once every one of them serves `target_version`."""
        layout = cast_layouts(self.layout(), dtype)
        return self._publish("publish", layout, targets, target_version=target_version, timeout_s=timeout_s)

    def publish_adapter(
        self, targets: Sequence[PublishTarget], *, target_version: int, dtype: str | None, timeout_s: float
    ) -> PublishReport:
        """As `publish`, of the adapter that is trained: servers hold it as policy `ADAPTER_POLICY`, over the base
        weights that were published before."""
        if self._adapter_layout is None:
            self._adapter_layout = self._everywhere("adapter_layout")[0]
        layout = cast_layouts(self._adapter_layout, dtype)
        return self._publish("publish_adapter", layout, targets, target_version=target_version, timeout_s=timeout_s)

    def _publish(
        self, method: str, layout: tuple[TensorLayout, ...], targets: Sequence[PublishTarget], **options: Any
    ) -> PublishReport:
        first = (layout, list(targets), options)
        others = [(layout, None, options)] * (self.num_workers - 1)
        return self._workers.run(method, [first, *others])[0]

    def catch_up(self, targets: Sequence[PublishTarget], *, timeout_s: float) -> PublishReport:
        """Gives targets that missed it the last publish again. May be called while another thread trains; ranks in
        other processes answer after that. Raises RolloutError or ValueError where a target did not get it."""
        arguments = [(list(targets), timeout_s), *[(None, timeout_s)] * (self.num_workers - 1)]
        result = self._workers.run("catch_up", arguments)[0]
        if isinstance(result, Exception):
            raise result
        return result

    def save(self, folder: Path) -> None:
        """Everything that a resumed run needs: bit for bit with as many workers, to rounding with another number."""
        self._everywhere("save", Path(folder))

    def load(self, folder: Path) -> list[str]:
        """What any number of workers of any backend saved; notes on what could not go on as it was."""
        return self._everywhere("load", Path(folder))[0]

    def save_weights(self, folder: Path) -> None:
        """Weights alone, for `load_weights` of any group of the same model."""
        self._everywhere("save_weights", Path(folder))

    def load_weights(self, folder: Path) -> None:
        self._everywhere("load_weights", Path(folder))

    def save_hf(self, folder: Path) -> None:
        """A folder that `transformers.AutoModelForCausalLM.from_pretrained` loads, without the tokenizer."""
        self._everywhere("save_hf", Path(folder))

    def offload(self) -> None:
        """Moves weights and optimizer off the accelerator."""
        self._everywhere("offload")

    def onload(self) -> None:
        self._everywhere("onload")

    def close(self) -> None:
        self._workers.close()

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return self._workers.run(method, [arguments] * self.num_workers)

    def _loss_arguments(self, minibatch: TrajectoryBatch, spec: LossSpec) -> tuple[list[tuple[Any, ...]], Normalisers]:
        """(what each rank's worker is called with, the mini-batch's counts)."""
        prepared, normalisers = self._prepared(minibatch, spec)
        shards, num_micro = self._cut(prepared, self._train_limits)
        return [(_select(prepared, shard), spec, normalisers, num_micro) for shard in shards], normalisers

    def _prepared(self, minibatch: TrajectoryBatch, spec: LossSpec) -> tuple[TrajectoryBatch, Normalisers]:
        """The mini-batch with all that must be known of the whole of it, and its counts."""
        present_T = None
        if needs_present_logprobs(spec.algorithm):
            present_T = self.logprobs(minibatch, temperature=spec.temperature)
        return prepare(
            minibatch,
            spec.algorithm,
            world_size=self.num_workers,
            micro_batch_size=self._train_limits.max_sequences,
            present_logprobs_T=present_T,
        )

    def _per_token(self, method: str, batch: TrajectoryBatch, *arguments: Any) -> torch.Tensor:
        """CPU [T]: what the workers' `method` says of each response token."""
        shards, num_micro = self._cut(batch, self._forward_limits)
        results = self._workers.run(method, [(_select(batch, shard), *arguments, num_micro) for shard in shards])
        index = torch.cat([batch.response_index(shard) for shard in shards])
        values = torch.cat([r for r, shard in zip(results, shards, strict=True) if shard])
        out = torch.empty(batch.loss_mask_T.numel(), dtype=values.dtype)
        out[index] = values
        return out

    def _cut(self, batch: TrajectoryBatch, limits: MicroLimits) -> tuple[list[list[int]], int]:
        shards = balance(batch.seq_lens_S, self.num_workers)
        return shards, num_micro_batches([batch.seq_lens_S[shard] for shard in shards], limits)


def _select(batch: TrajectoryBatch, shard: list[int]) -> TrajectoryBatch | None:
    return batch.select(shard) if shard else None
