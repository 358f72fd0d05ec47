"""Which rows a file holds: parquet, json or jsonl; whatever cannot be read is named by file and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]


def read_rows(path: Path, *, key: str) -> Rows:
    """All rows of one file, at least one. Raises ValueError naming `key`, the file and where in it."""
    if path.suffix not in READERS:
        raise ValueError(f"{key}: {path} is not a .parquet, .json or .jsonl file, nor a data set's folder or name")
    if not path.is_file():
        raise ValueError(f"{key}: no such file: {path}")
    rows = READERS[path.suffix](path, key)
    if not rows:
        raise ValueError(f"{key}: {path} holds no rows")
    return rows


def _read_parquet(path: Path, key: str) -> Rows:
    """Pages that carry a checksum are checked, so that a changed byte is not read as another prompt."""
    unreadable = f"{key}: {path} ({path.stat().st_size} bytes) is not a readable parquet file"
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{unreadable}: {_first_line(error)}") from error
    with file:
        rows: Rows = []
        for group in range(file.num_row_groups):
            try:
                rows += file.read_row_group(group).to_pylist()
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                last = len(rows) + file.metadata.row_group(group).num_rows - 1
                raise ValueError(
                    f"{unreadable}: rows {len(rows)} to {last} (row group {group}) are damaged: {_first_line(error)}; "
                    f"make the file again"
                ) from error
        return rows


def _read_json(path: Path, key: str) -> Rows:
    """A JSON array of objects, or one object a line under the name .json."""
    try:
        rows = json.loads(_text(path, key))
    except json.JSONDecodeError:
        return _read_json_lines(path, key)
    if isinstance(rows, list):
        return rows
    if isinstance(rows, dict):
        return [rows]
    raise ValueError(f"{key}: {path}: expected a list of objects, got {rows!r:.80}")


def _read_json_lines(path: Path, key: str) -> Rows:
    rows = []
    for number, line in enumerate(_text(path, key).splitlines(), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{key}: {path}, line {number} is not JSON: {error}") from error
    return rows


def _text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path} is not UTF-8 text: {error}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_json_lines,
}  # fmt: skip
