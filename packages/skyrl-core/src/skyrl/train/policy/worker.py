"""What every rank does with its share of a batch: logprobs, the loss over micro-batches, one step, its files.

The backend knows the model and the optimizer; losses, micro-batches and metrics live here, once for all backends.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from skyrl_rollout.errors import RolloutError
from skyrl_rollout.weights.manifest import TensorLayout
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget

from skyrl.train.algorithms.objective import micro_loss
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import LossSpec, Normalisers, PolicyBackend, Role, WorkerPlace
from skyrl.train.policy.publishing import Publisher, tensor_layouts
from skyrl.train.policy.sharding import MicroLimits, micro_batches
from skyrl.train.policy.shares import combine


class PolicyWorker:
    """One rank of the policy or of the reference. Every rank must be called with the same methods in the same order;
    `num_micro` is equal on all."""

    def __init__(self, cfg: Any, factory: str, place: WorkerPlace, role: Role, *, total_steps: int) -> None:
        self.place, self.role = place, role
        self._train_limits, self._forward_limits = (train_limits(cfg), forward_limits(cfg))
        self.backend: PolicyBackend = load_factory(factory)(cfg, place, role, total_steps=total_steps)
        self._publisher: Publisher | None = None
        self._transport = weight_transport(cfg)
        self._deltas = cfg.generator.inference_engine.weight_sync_backend == "delta"

    def logprobs(self, shard: TrajectoryBatch | None, temperature: float, num_micro: int) -> torch.Tensor:
        """CPU [T of the shard]: log_softmax(logits / temperature) of each response token, in the shard's order."""

        def score(micro: TrajectoryBatch) -> torch.Tensor:
            return self.backend.token_logprobs(micro, temperature=temperature, with_entropy=False, grad=False)[0]

        return self._per_token(shard, num_micro, score)

    def update(
        self, shard: TrajectoryBatch | None, spec: LossSpec, normalisers: Normalisers, num_micro: int
    ) -> dict[str, float]:
        """Gradients over all micro-batches, then one step. This rank's share of the mini-batch's metrics (they add up
        over ranks), plus <role>/grad_norm and <role>/<role>_lr, which are equal on all. A non-finite gradient skips the
        step and counts in <role>/num_skipped_updates."""
        shares = self.forward_backward(shard, spec, normalisers, num_micro)
        grad_norm, learning_rate = self.backend.step()
        same_on_all = {
            f"{self.role}/grad_norm": grad_norm,
            f"{self.role}/{self.role}_lr": learning_rate,
            f"{self.role}/num_skipped_updates": float(not math.isfinite(grad_norm)),
        }
        return shares | {name: value / normalisers.world_size for name, value in same_on_all.items()}

    def forward_backward(
        self, shard: TrajectoryBatch | None, spec: LossSpec, normalisers: Normalisers, num_micro: int
    ) -> dict[str, float]:
        """Accumulates the gradient of the mini-batch's loss and returns this rank's share of each metric."""
        found: list[dict[str, torch.Tensor]] = []
        for index, micro in self._micros(shard, self._train_limits, num_micro):
            outputs = self.outputs(micro, spec)
            if index is None:
                # the collectives of the other ranks wait for this backward
                self.backend.backward(outputs[0].sum() * 0.0)
                continue
            loss, shares = self.micro_loss(micro, outputs, spec, normalisers)
            self.backend.backward(loss * normalisers.world_size)
            found.append(shares)
        return combine(found)

    def outputs(self, micro: TrajectoryBatch, spec: LossSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the loss looks at, with a gradient: logprobs and entropy of each response token."""
        logprobs_T, entropy_T = self.backend.token_logprobs(
            micro, temperature=spec.temperature, with_entropy=True, grad=True
        )
        if entropy_T is not None and not spec.algorithm.use_entropy_loss:
            entropy_T = entropy_T.detach()
        return logprobs_T, entropy_T

    def micro_loss(
        self,
        micro: TrajectoryBatch,
        outputs: tuple[torch.Tensor, torch.Tensor | None],
        spec: LossSpec,
        normalisers: Normalisers,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This micro-batch's part of the mini-batch's loss, and its share of each metric."""
        loss, shares = micro_loss(micro, *outputs, spec.algorithm, num_tokens=normalisers.num_tokens)
        tokens = torch.tensor(micro.loss_mask_T.numel() / max(normalisers.num_sequences, 1), dtype=torch.float64)
        return loss, {"policy/response_length": tokens} | shares

    def gradients(
        self, shard: TrajectoryBatch | None, spec: LossSpec, normalisers: Normalisers, num_micro: int
    ) -> dict[str, torch.Tensor]:
        """The full gradient of the mini-batch's loss, without a step; for checks."""
        self.forward_backward(shard, spec, normalisers, num_micro)
        return dict(self.backend.export_gradients())

    def weights(self) -> dict[str, torch.Tensor]:
        """All full weights on the CPU, and the adapter's (rank 0; the others take part and may return empty ones)."""
        return dict(self.backend.export_weights()) | dict(self.backend.export_adapter())

    def layout(self) -> tuple[TensorLayout, ...]:
        return tensor_layouts(self.backend.export_weights())

    def adapter_layout(self) -> tuple[TensorLayout, ...]:
        return tensor_layouts(self.backend.export_adapter())

    def publish(
        self, layout: Sequence[TensorLayout], targets: Sequence[PublishTarget] | None, options: dict[str, Any]
    ) -> PublishReport | None:
        """Rank 0 streams its weights to the servers; the others only take part in gathering them."""
        return self._publish(Publisher.publish, self.backend.export_weights(), layout, targets, options)

    def publish_adapter(
        self, layout: Sequence[TensorLayout], targets: Sequence[PublishTarget] | None, options: dict[str, Any]
    ) -> PublishReport | None:
        """As `publish`, of the adapter that is trained."""
        assert self.backend.adapter is not None, "no adapter is trained"
        send = partial(Publisher.publish_adapter, adapter=self.backend.adapter)
        return self._publish(send, self.backend.export_adapter(), layout, targets, options)

    def _publish(
        self,
        send: Callable[..., PublishReport],
        tensors: Iterator[tuple[str, torch.Tensor]],
        layout: Sequence[TensorLayout],
        targets: Sequence[PublishTarget] | None,
        options: dict[str, Any],
    ) -> PublishReport | None:
        try:
            if targets is None:
                return None
            self._publisher = self._publisher or Publisher(self._transport, deltas=self._deltas)
            return send(self._publisher, layout, tensors, targets, **options)
        finally:
            # a publish that fails half-way must not leave the other ranks in a collective
            for _ in tensors:
                pass

    def catch_up(
        self, targets: Sequence[PublishTarget] | None, timeout_s: float
    ) -> PublishReport | RolloutError | ValueError | None:
        """Rank 0 sends its last publish again; no rank has to take part. A failure is answered, not raised: it is the
        server's, and the workers are whole."""
        if targets is None:
            return None
        if self._publisher is None:
            return ValueError("nothing has been published yet")
        try:
            return self._publisher.catch_up(targets, timeout_s=timeout_s)
        except (RolloutError, ValueError) as error:
            return error

    def save(self, folder: Path) -> None:
        self.backend.save(folder)

    def load(self, folder: Path) -> list[str]:
        return self.backend.load(folder)

    def save_weights(self, folder: Path) -> None:
        self.backend.save_weights(folder)

    def load_weights(self, folder: Path) -> None:
        self.backend.load_weights(folder)

    def save_hf(self, folder: Path) -> None:
        self.backend.save_hf(folder)

    def offload(self) -> None:
        self.backend.offload()

    def onload(self) -> None:
        self.backend.onload()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self.backend.close()

    def _per_token(
        self, shard: TrajectoryBatch | None, num_micro: int, score: Callable[[TrajectoryBatch], torch.Tensor]
    ) -> torch.Tensor:
        """CPU [T of the shard], in the shard's order: what `score` says of each micro-batch's tokens."""
        parts, order = [], []
        for index, micro in self._micros(shard, self._forward_limits, num_micro):
            values_T = score(micro)
            if index is not None and shard is not None:
                parts.append(values_T.detach().cpu())
                order.append(shard.response_index(index))
        if shard is None or not parts:
            return torch.zeros(0)
        out = torch.empty(shard.loss_mask_T.numel(), dtype=parts[0].dtype)
        out[torch.cat(order)] = torch.cat(parts)
        return out

    def _micros(
        self, shard: TrajectoryBatch | None, limits: MicroLimits, num_micro: int
    ) -> Iterator[tuple[list[int] | None, TrajectoryBatch]]:
        """`num_micro` micro-batches on the device; where this rank has no work left, (None, one token of nothing)."""
        cuts = [] if shard is None else micro_batches(shard.seq_lens_S, limits)
        assert len(cuts) <= num_micro, f"rank {self.place.rank} has {len(cuts)} micro-batches, was told {num_micro}"
        for index in cuts:
            assert shard is not None
            yield index, shard.select(index).to(self.place.device)
        for _ in range(num_micro - len(cuts)):
            yield None, nothing().to(self.place.device)


def nothing() -> TrajectoryBatch:
    """One prompt token and one response token that is not trained on."""
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1)
    return TrajectoryBatch(
        token_ids_N=torch.zeros(2, dtype=torch.int64),
        seq_lens_S=one * 2,
        prompt_lens_S=one,
        group_ids_S=one * 0,
        loss_mask_T=zero,
        rewards_T=zero,
        rollout_logprobs_T=zero,
        weight_versions_T=-one,
    )


def weight_transport(cfg: Any) -> str:
    """ "auto", "shm" or "inline" from generator.inference_engine.weight_sync_backend; nccl and delta mean auto."""
    asked = cfg.generator.inference_engine.weight_sync_backend
    return "auto" if asked in ("nccl", "delta") else asked


def train_limits(cfg: Any) -> MicroLimits:
    """Of a micro-batch with a backward pass."""
    return MicroLimits(cfg.trainer.micro_train_batch_size_per_gpu, cfg.trainer.max_tokens_per_microbatch)


def forward_limits(cfg: Any) -> MicroLimits:
    """Of a micro-batch that is only scored."""
    return MicroLimits(cfg.trainer.micro_forward_batch_size_per_gpu, cfg.trainer.max_tokens_per_microbatch)


def load_factory(target: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
