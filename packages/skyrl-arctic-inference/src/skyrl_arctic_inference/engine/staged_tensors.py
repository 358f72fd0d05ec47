"""Staged bytes as tensors, in the process that loads them: mapped, not copied."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence

import torch

TORCH_DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2, "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8,
}  # fmt: skip
Row = tuple[str, str, Sequence[int], int]


def staged_tensors(path: str, rows: Sequence[Row]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every row; the memory stays mapped as long as a tensor lives."""
    with open(path, "rb") as file:
        staged = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants it writable
    for name, dtype, shape, offset in rows:
        flat = torch.frombuffer(staged, dtype=TORCH_DTYPES[dtype], count=math.prod(shape), offset=offset)
        yield name, flat.view(tuple(shape))
