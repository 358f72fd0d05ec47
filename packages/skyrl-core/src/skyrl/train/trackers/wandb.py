"""Metrics into Weights & Biases through the client that the user installs; WANDB_MODE=offline needs no account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class WandbTracker:
    """ValueError when the client is not installed."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "trainer.logger=wandb needs the wandb client: install skyrl-core[wandb], or use tensorboard"
            ) from None
        log_folder.mkdir(parents=True, exist_ok=True)
        self._table = wandb.Table
        self._run = wandb.init(
            project=cfg.trainer.project_name,
            name=cfg.trainer.run_name,
            tags=list(cfg.trainer.tags or ()),
            dir=str(log_folder),
            config=cfg.model_dump(mode="json"),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        # the step's metrics come after it and commit both
        self._run.log({name: self._table(columns=columns, data=data)}, step=step, commit=False)

    def close(self, error: str | None) -> None:
        if error is not None:
            self._run.log({"error/tracebacks": self._table(columns=["error"], data=[[error]])})
        self._run.finish(exit_code=0 if error is None else 1)
