"""Tensors to and from a folder of torch.distributed.checkpoint files: every rank its part, cut anew when it is read."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from skyrl.train.policy.checkpoint.contents import ANOTHER
from skyrl.train.policy.checkpoint.stretch import Stretch

INDEX = ".metadata"
# What an index is pickled from; anything else is not unpickled.
_SAFE = {
    "builtins": {"dict", "list", "set", "tuple"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}
_SAFE_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

# It would report an error here as a line of its own beside the exception, which says it already.
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False

# Kind ("weights", "exp_avg", ...) -> name -> the tensor, a DTensor or a Stretch.
Tensors = Mapping[str, Mapping[str, Any]]


def write(folder: Path, tensors: Tensors) -> None:
    """One file per rank and the index (collective). OSError where any rank could not write, with what stopped it."""
    writer = FileSystemWriter(folder)
    try:
        # nested, so that torch's own converters give back kind -> name -> tensor
        nested = {kind: dict(named) for kind, named in tensors.items()}
        dcp.save(nested, storage_writer=writer, planner=_SavePlanner())
    except CheckpointException as error:
        raise OSError(f"{folder} could not be written: {_reasons(error)}") from error


def read(folder: Path, tensors: Tensors) -> None:
    """Fills the tensors in place (collective). ValueError where any rank could not read its part."""
    try:
        flat = {f"{kind}.{name}": held for kind, named in tensors.items() for name, held in named.items()}
        dcp.load(flat, storage_reader=_Reader(folder), planner=_LoadPlanner(flatten_state_dict=False))
    except CheckpointException as error:
        raise ValueError(f"{folder} cannot be read ({_reasons(error)}): {ANOTHER}") from error


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        if isinstance(held, Stretch):
            assert index.offset is not None
            return held.piece(index.offset)
        return super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own would put None in the place of what it does not know
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        held = self.state_dict[index.fqn]
        if isinstance(held, Stretch):
            assert index.offset is not None
            return held.piece(index.offset)
        return super().lookup_tensor(index)


class _Reader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index = _index(folder / INDEX)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._index.storage_meta = self._index.storage_meta or StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


def _index(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:  # an unpickler raises whatever the bytes lead it to
        raise ValueError(f"{path} cannot be read ({error}): {ANOTHER}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_constant = module == "torch" and isinstance(getattr(torch, name, None), _CONSTANTS)
        if module in _SAFE_MODULES or name in _SAFE.get(module, ()) or is_constant:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
