"""Metrics into Weights & Biases through its own client, which the user installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class WandbTracker:
    """ValueError when the client is not installed."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError("trainer.logger=wandb needs the wandb client: install it, or use tensorboard") from None
        self._run = wandb.init(
            project=cfg.trainer.project_name,
            name=cfg.trainer.run_name,
            dir=str(log_folder),
            config=cfg.model_dump(mode="json"),
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step, commit=True)

    def close(self) -> None:
        self._run.finish()
