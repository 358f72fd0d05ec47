"""Metrics as one JSON object per step in `<log folder>/metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonlTracker:
    """`trainer.logger=[jsonl]`."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        del cfg
        log_folder.mkdir(parents=True, exist_ok=True)
        self._file = (log_folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()  # a killed run keeps every step it finished

    def close(self) -> None:
        self._file.close()
