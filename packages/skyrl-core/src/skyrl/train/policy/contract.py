"""What a policy backend supplies in every rank. Losses, mini-batches and metrics are the core's, written once.

A backend is a model with an optimizer on one rank of a process group. It is built by a factory named in its
`BackendPlugin`, inside the worker process, after the process group exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from skyrl.train.policy.batch import TrajectoryBatch

Role = Literal["policy", "critic", "ref"]


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker runs. The process group (gloo or nccl) is initialised before the factory is called."""

    rank: int
    world_size: int
    device: torch.device
    local_rank: int = 0


@dataclass(frozen=True)
class AdapterSpec:
    """A low-rank adapter (arXiv 2106.09685): weights are W + (alpha / rank) * B @ A, and only A and B are trained."""

    rank: int
    alpha: float


@dataclass(frozen=True)
class LossSpec:
    """Which loss to apply: the algorithm's frozen config, picklable. Names in it index the core's tables."""

    algorithm: Any  # config.AlgorithmConfig
    temperature: float


@dataclass(frozen=True)
class Normalisers:
    """Counts over the whole mini-batch on all ranks, known before its first micro-batch."""

    num_tokens: float  # sum of the loss mask
    num_sequences: int
    world_size: int
    known: dict[str, float] = field(default_factory=dict)  # metrics of the mini-batch that no micro-batch changes


class PolicyBackend(Protocol):
    """One rank's model. Every rank calls each method the same number of times in the same order."""

    place: WorkerPlace
    adapter: AdapterSpec | None  # what is trained instead of the weights, if anything

    def token_logprobs(
        self, micro: TrajectoryBatch, *, temperature: float, with_entropy: bool, grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logprobs_T, entropy_T or None): log_softmax(logits / temperature) of each response token, float32
        (float64 for a float64 model), on the place's device, as `micro` is. Both carry a gradient iff `grad`."""
        ...

    def token_values(self, micro: TrajectoryBatch, *, grad: bool) -> torch.Tensor:
        """[T] of a critic: what its value head says where each response token is about to be sampled, in the precision
        and on the device of `token_logprobs`, which a critic does not have."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates gradients; the backend averages over ranks, so `loss` is already multiplied by world_size."""
        ...

    def step(self) -> tuple[float, float]:
        """(grad_norm before clipping, learning rate used). Clips, applies AdamW and the schedule, zeroes gradients. A
        non-finite norm skips the update (the norm is returned as it is)."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full CPU tensors under Hugging Face checkpoint names, tied tensors once, in one fixed order. Collective:
        every rank iterates; ranks other than 0 may yield empty tensors. With an adapter: the base's, which never
        change."""
        ...

    def export_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapter's tensors as `export_weights`, named as PEFT saves them; none without one."""
        ...

    def export_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full CPU gradients accumulated since the last step, under the names and in the order of `export_weights`, or
        of `export_adapter` where that is what is trained; collective. For checks, not for training."""
        ...

    def save(self, folder: Path) -> None:
        """Weights, moments, schedule and random state into `folder` (collective), as `policy.checkpoint` lays them out:
        any number of ranks of any backend can go on from it. OSError where a rank cannot write."""
        ...

    def load(self, folder: Path) -> list[str]:
        """What `save` of any backend stored (collective). Notes say what could not go on as it was. ValueError names
        the file that is missing, damaged or of another model."""
        ...

    def save_weights(self, folder: Path) -> None:
        """Weights alone, in the precision of the optimizer's copy (collective)."""
        ...

    def load_weights(self, folder: Path) -> None:
        """What `save_weights` of any backend stored, in this model's precision (collective)."""
        ...

    def save_hf(self, folder: Path) -> None:
        """A folder that `AutoModelForCausalLM.from_pretrained` loads, without the tokenizer (collective). A critic's is
        one that `trainer.critic.model.path` takes. With an adapter it is the base with the adapter merged in, and holds
        the adapter beside it in `lora_adapter/`."""
        ...

    def offload(self) -> None:
        """Moves model and optimizer off the accelerator."""
        ...

    def onload(self) -> None: ...

    def close(self) -> None: ...
