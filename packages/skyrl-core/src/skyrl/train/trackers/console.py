"""Metrics as sorted `name: value` lines on standard output."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class ConsoleTracker:
    """`trainer.logger=[console]`."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        del cfg, log_folder

    def log(self, metrics: dict[str, float], step: int) -> None:
        lines = [f"step {step}", *(f"  {name}: {metrics[name]:.4g}" for name in sorted(metrics))]
        print("\n".join(lines), flush=True)

    def close(self) -> None:
        return None
