"""What a checkpoint folder says of itself (`contents.json`): whose state it is, and the digest of each of its files.

It is written last. A folder without it is no checkpoint; a file that is not as it says is named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

FILE = "contents.json"
ANOTHER = "resume from another global_step_N folder with trainer.resume_mode=from_path"
SHOWN = 5
_BLOCK = 1 << 24


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorEntry(_Part):
    """One tensor: its whole shape, the dtype it was stored in, and the updates that its moments have seen."""

    shape: tuple[int, ...]
    dtype: str
    steps: int | None = None  # None: it has no moments


class FileEntry(_Part):
    """One file."""

    bytes: int
    xxh3_128: str


class Contents(_Part):
    """`schedule_steps` is the schedule's position; None for weights alone, without an optimizer."""

    layout: int = 1
    made_by: str
    world_size: int
    schedule_steps: int | None
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]


def write(folder: Path, contents: Contents) -> None:
    """The file itself, on the disk when this returns."""
    with (folder / FILE).open("w", encoding="utf-8") as file:
        file.write(contents.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Contents:
    """ValueError names what is missing or damaged."""
    path = folder / FILE
    if not path.is_file():
        found = sorted(p.name for p in folder.iterdir())[:SHOWN] if folder.is_dir() else []
        raise ValueError(f"{path} is missing (found: {', '.join(found) or 'no such folder'}): {_why_missing(found)}")
    try:
        return Contents.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is damaged ({where + ': ' if where else ''}{first['msg']}): {ANOTHER}") from None


def digests(folder: Path, files: Iterable[str]) -> dict[str, FileEntry]:
    """Size and digest of files, named relative to `folder`, as they can be read back."""
    return {name: _digest(folder / name) for name in files}


def damage(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """What is wrong with these files: one sentence for each that is missing, cut or changed."""
    problems = []
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                problems.append(f"{path} is damaged ({size} bytes of {entry.bytes})")
            elif _digest(path).xxh3_128 != entry.xxh3_128:
                problems.append(f"{path} is damaged (its checksum differs)")
        except FileNotFoundError:
            problems.append(f"{path} is missing")
        except OSError as error:
            problems.append(f"{path} cannot be read ({error.strerror})")
    return problems


def require_same_tensors(folder: Path, stored: Mapping[str, TensorEntry], ours: Mapping[str, Sequence[int]]) -> None:
    """ValueError lists names and shapes where the stored tensors are not those of the model."""
    problems = []
    for name, shape in ours.items():
        if name not in stored:
            problems.append(f"{name} {list(shape)} is missing")
        elif stored[name].shape != tuple(shape):
            problems.append(f"{name} is {list(stored[name].shape)}, the model needs {list(shape)}")
    problems += [
        f"{name} {list(entry.shape)} is not in the model" for name, entry in stored.items() if name not in ours
    ]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(
            f"{folder / FILE}: {'; '.join(problems[:SHOWN])}{more}: the checkpoint is of another model: resume with "
            f"the model that saved it (the config.yaml beside it names it), or start with trainer.resume_mode=none"
        )


def _digest(path: Path) -> FileEntry:
    hashed, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
            size += len(block)
    return FileEntry(bytes=size, xxh3_128=hashed.hexdigest())


def _why_missing(found: Sequence[str]) -> str:
    if any("_world_size_" in name or name == "made_by.json" for name in found):
        return (
            "this is the layout of another version: resume with the version that saved it, or start from its Hugging "
            "Face export"
        )
    return ANOTHER
