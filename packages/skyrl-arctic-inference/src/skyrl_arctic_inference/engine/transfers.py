"""Weights straight from the trainer's memory into a vLLM worker, as engines of vLLM's own weight-transfer registry.

All of them take the tensors of a whole checkpoint in a fixed order and load them the way staged bytes are loaded; what
differs is the copy: a broadcast over NCCL or gloo, or a CUDA IPC mapping. The trainer is rank 0 of a group: it listens
at the meeting point with a `torch.distributed.TCPStore` (prefix "weights") and broadcasts every tensor as uint8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from skyrl_arctic_inference.engine.cuda_ipc import IpcMappings
from skyrl_arctic_inference.engine.staged_tensors import TORCH_DTYPES
from skyrl_arctic_inference.engine.weights_extension import replace_weights

MEET_TIMEOUT = timedelta(seconds=10)
GROUP_TIMEOUT = timedelta(seconds=60)  # for the trainer to enter, and then for each tensor
PREFIX = "weights"


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where rank 0 listens, and how many ranks meet; this server's first one is `rank_offset`."""

    master_addr: str = ""
    master_port: int = 0
    world_size: int = 0
    rank_offset: int = 0


@dataclass
class Tensors(WeightTransferUpdateInfo):
    """rows: (name, dtype, shape) in the order in which they come. handles: name -> (device UUID, handle, offset)."""

    rows: list[tuple[str, str, list[int]]]
    handles: dict[str, tuple[str, bytes, int]] = field(default_factory=dict)


class TrainerWeights(WeightTransferEngine[Meeting, Tensors]):
    """What all copies share. `runner` is the worker's model runner and is set once the engine was created."""

    init_info_cls: ClassVar[type[Meeting]] = Meeting
    update_info_cls: ClassVar[type[Tensors]] = Tensors
    runner: Any

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Meets the trainer's store; the group itself forms in `receive_weights`, when the trainer enters."""

    def start_weight_update(self) -> None:
        """Nothing: `receive_weights` loads everything at once."""

    def finish_weight_update(self) -> None:
        """Nothing: see `start_weight_update`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Tensors) -> None:
        """Raises RuntimeError when the trainer does not come or is gone, ValueError for a parameter without a value."""
        replace_weights(self.runner, self.vllm_config, self.device, self._tensors(update_info))

    def shutdown(self) -> None:
        """Leaves; safe to call twice."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any] | Any) -> None:
        """The other end of a group, for a trainer that has it as trainer_args["group"]."""
        for _, tensor in iterator:
            trainer_args["group"].broadcast(tensor.contiguous().view(-1).view(torch.uint8), root=0).wait()

    def _tensors(self, info: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in info.rows:
            kind = TORCH_DTYPES[dtype]
            data = self._bytes(name, math.prod(shape) * kind.itemsize, info)
            yield name, data.view(kind).view(tuple(shape))

    def _bytes(self, name: str, nbytes: int, info: Tensors) -> torch.Tensor:
        raise NotImplementedError


class GroupWeights(TrainerWeights):
    """One broadcast per tensor, from rank 0."""

    _store: TCPStore | None = None
    _group: Any = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self.shutdown()
        self._meeting = init_info
        self._store = TCPStore(
            init_info.master_addr, init_info.master_port, init_info.world_size, is_master=False, timeout=MEET_TIMEOUT
        )

    def receive_weights(self, update_info: Tensors) -> None:
        if self._store is None:
            raise RuntimeError("the group was left, or never met: join first")
        rank = self._meeting.rank_offset + self.parallel_config.rank
        self._store.set_timeout(GROUP_TIMEOUT)
        self._group = self._form(PrefixStore(PREFIX, self._store), rank, self._meeting.world_size)
        super().receive_weights(update_info)

    def shutdown(self) -> None:
        self._group = self._store = None

    def _bytes(self, name: str, nbytes: int, info: Tensors) -> torch.Tensor:
        data = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._group.broadcast(data, root=0).wait()
        return data

    def _form(self, store: PrefixStore, rank: int, size: int) -> Any:
        raise NotImplementedError


class NcclWeights(GroupWeights):
    """Over NCCL, from accelerator to accelerator."""

    def _form(self, store: PrefixStore, rank: int, size: int) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        return ProcessGroupNCCL(store, rank, size, options)


class GlooWeights(GroupWeights):
    """Over gloo, from host memory to host memory: what NCCL does, on machines without an accelerator."""

    def _form(self, store: PrefixStore, rank: int, size: int) -> Any:
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, size, GROUP_TIMEOUT)


class CudaIpcWeights(TrainerWeights):
    """By mappings of the trainer's tensors on accelerators of the same host; nobody has to enter anything."""

    _mappings: IpcMappings | None = None

    def receive_weights(self, update_info: Tensors) -> None:
        self._mappings = IpcMappings()
        try:
            super().receive_weights(update_info)
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        mappings, self._mappings = self._mappings, None
        if mappings is not None:
            mappings.close()

    def _bytes(self, name: str, nbytes: int, info: Tensors) -> torch.Tensor:
        assert self._mappings is not None
        if name not in info.handles:
            raise ValueError(f"the trainer sent no handle for {name}")
        uuid, handle, offset = info.handles[name]
        return self._mappings.view(uuid, handle, offset, nbytes).to(self.device, copy=True)


ENGINES = {"nccl": NcclWeights, "gloo": GlooWeights, "cuda_ipc": CudaIpcWeights}


def registered(backend: str) -> str:
    """The name under which vLLM's registry has the engine of this transport. Raises ValueError for an unknown one."""
    if backend not in ENGINES:
        raise ValueError(f"transport {backend!r} is not one of {', '.join(ENGINES)}")
    name = f"skyrl_{backend}"
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, ENGINES[backend])
    return name
