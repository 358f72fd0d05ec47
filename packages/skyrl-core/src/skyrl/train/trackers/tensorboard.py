"""Metrics as TensorBoard scalars in $TENSORBOARD_DIR or `<log folder>/tensorboard`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class TensorBoardTracker:
    """`trainer.logger=[tensorboard]`."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        del cfg
        from torch.utils.tensorboard import SummaryWriter  # costs a second: only runs that ask for it pay

        self._writer = SummaryWriter(os.environ.get("TENSORBOARD_DIR") or str(log_folder / "tensorboard"))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
