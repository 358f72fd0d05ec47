"""Metrics as one JSON object per step in `<log folder>/metrics.jsonl`, tables as one per row in `<name>.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class JsonlTracker:
    """`trainer.logger=[jsonl]`."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        del cfg
        self._folder = log_folder
        log_folder.mkdir(parents=True, exist_ok=True)
        self._file = (log_folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()  # a killed run keeps every step it finished

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        path = self._folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)

    def close(self, error: str | None) -> None:
        self._file.close()
