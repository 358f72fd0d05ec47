"""A Hugging Face folder as this project writes one, and whether the weights in one are whole, told by sizes alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from skyrl.train.checkpoints import PARTIAL

INDEX = "model.safetensors.index.json"
SHARD_SIZE: int | str = "5GB"  # a larger checkpoint is several files and an index
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100 << 20  # of the safetensors format


def write(folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Weights under the checkpoint's names in the dtype they were trained in, the model's configuration, and how it
    generates. `tensors`: whole, under the model's own names, tied ones once."""
    model.save_pretrained(folder, state_dict=tensors, max_shard_size=SHARD_SIZE)


def require_whole(path: str, where: str) -> None:
    """ValueError names each file of the weights in folder `path` that is missing or cut; `where` begins the message."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    problems = list(_problems(folder))
    if folder.name.startswith(".") and folder.name.endswith(PARTIAL):
        problems.insert(0, "it is an export that was never finished")
    if problems:
        raise ValueError(f"{where} cannot be loaded: {'; '.join(problems)}: take another export, or copy it again")


def _problems(folder: Path) -> Iterator[str]:
    index = folder / INDEX
    if index.is_file():
        try:
            named = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{index} is damaged ({type(error).__name__}: {error})"
            return
        yield from (f"{folder / name} is missing" for name in sorted(named) if not (folder / name).is_file())
    for file in sorted(folder.glob("*.safetensors")):
        if (problem := _damage(file)) is not None:
            yield f"{file} is damaged ({problem})"


def _damage(file: Path) -> str | None:
    """What is wrong with a safetensors file, from its header and its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES):
            return f"{size} bytes without a whole header"
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            return f"its header is no JSON of tensors: {error}"
    expected = _LENGTH_BYTES + length + end
    return None if size == expected else f"{size} bytes of {expected}"
