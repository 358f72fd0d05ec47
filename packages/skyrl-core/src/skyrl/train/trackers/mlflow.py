"""Metrics into MLflow through its own client, which the user installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class MlflowTracker:
    """ValueError when the client is not installed. MLflow refuses '@' in names: it becomes '_at_'."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        del log_folder
        try:
            import mlflow
        except ImportError:
            raise ValueError("trainer.logger=mlflow needs the mlflow client: install it, or use tensorboard") from None
        self._mlflow = mlflow
        mlflow.set_experiment(cfg.trainer.project_name)
        mlflow.start_run(run_name=cfg.trainer.run_name)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()
