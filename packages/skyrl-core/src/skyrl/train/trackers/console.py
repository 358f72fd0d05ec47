"""Metrics as sorted `name: value` lines on standard output; of trajectories the trainer prints an example itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ConsoleTracker:
    """`trainer.logger=[console]`."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        del cfg, log_folder

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        lines = [f"step {step}", *(f"  {name}: {metrics[name]:.4g}" for name in sorted(metrics))]
        print("\n".join(lines), flush=True)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        return None

    def close(self, error: str | None) -> None:
        return None
