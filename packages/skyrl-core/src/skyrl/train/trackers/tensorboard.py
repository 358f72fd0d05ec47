"""Metrics as TensorBoard scalars in $TENSORBOARD_DIR or `<log folder>/tensorboard`, tables and tags as texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class TensorBoardTracker:
    """`trainer.logger=[tensorboard]`."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # costs a second: only runs that ask for it pay

        self._writer = SummaryWriter(os.environ.get("TENSORBOARD_DIR") or str(log_folder / "tensorboard"))
        if cfg.trainer.tags:
            self._writer.add_text("tags", ", ".join(cfg.trainer.tags), 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._writer.add_text(name, "\n\n---\n\n".join(_as_text(row) for row in rows), step)

    def close(self, error: str | None) -> None:
        if error is not None:
            self._writer.add_text("error", error)
        self._writer.close()


def _as_text(row: Mapping[str, Any]) -> str:
    """Markdown: short values on one line, texts below it, indented so that nothing in them is markup."""
    short = ", ".join(f"{name} {value}" for name, value in row.items() if not isinstance(value, str))
    long = [line for value in row.values() if isinstance(value, str) for line in value.splitlines()]
    return short + "\n\n" + "\n".join(f"    {line}" for line in long)
