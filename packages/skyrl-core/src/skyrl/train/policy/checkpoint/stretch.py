"""The part of a tensor that a rank holds as a run of its elements in row-major order, as boxes of the whole tensor.

ZeRO shards so; torch's distributed checkpoint stores and cuts boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Box:
    """A rectangular piece: where it begins in the whole tensor and how large it is along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, length: int) -> list[Box]:
    """The boxes that together are elements [start, start + length) of a tensor of `shape`, in that order."""
    if length <= 0:
        return []
    if len(shape) <= 1:
        return [Box((start,), (length,))] if shape else [Box((), ())]
    row, inner = math.prod(shape[1:]), tuple(shape[1:])
    out: list[Box] = []
    position, end = start, start + length
    while position < end:
        index, inside = divmod(position, row)
        if inside == 0 and end - position >= row:
            rows = (end - position) // row
            out.append(Box((index, *(0 for _ in inner)), (rows, *inner)))
            position += rows * row
            continue
        taken = min(row - inside, end - position)
        out += [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes(inner, inside, taken)]
        position += taken
    return out


class Stretch:
    """Elements [start, start + n) of a tensor of `shape`; `values` [n] is the live storage, which a load fills.

    The methods with underscores are those by which torch.distributed.checkpoint asks an object for its boxes.
    """

    def __init__(self, shape: Sequence[int], start: int, values: torch.Tensor) -> None:
        self.shape, self.values = torch.Size(shape), values
        self.boxes = boxes(shape, start, values.numel())

    def size(self) -> torch.Size:
        return self.shape

    def piece(self, offsets: Sequence[int]) -> torch.Tensor:
        """The values of the box at `offsets`, in its shape. KeyError where there is none."""
        position = 0
        for box in self.boxes:
            length = math.prod(box.sizes)
            if box.offsets == tuple(offsets):
                return self.values[position : position + length].view(box.sizes)
            position += length
        raise KeyError(f"no box at {tuple(offsets)}")

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]
