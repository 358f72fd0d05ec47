"""Metrics into MLflow through its own client, which the user installs; its server or folder is MLFLOW_TRACKING_URI."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class MlflowTracker:
    """ValueError when the client is not installed. MLflow refuses '@' in names: it becomes '_at_'."""

    def __init__(self, cfg: Any, log_folder: Path) -> None:
        del log_folder
        try:
            import mlflow
        except ImportError:
            raise ValueError(
                "trainer.logger=mlflow needs the mlflow client: install skyrl-core[mlflow], or use tensorboard"
            ) from None
        self._metric = mlflow.entities.Metric
        # the client and not the module's functions: these keep their run per thread
        self._client = mlflow.MlflowClient()
        name = cfg.trainer.project_name
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        tags = dict.fromkeys(cfg.trainer.tags or (), "true")
        self._run_id = self._client.create_run(experiment, run_name=cfg.trainer.run_name, tags=tags).info.run_id
        self._client.log_dict(self._run_id, cfg.model_dump(mode="json"), "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        named = [self._metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=named)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        self._client.log_table(self._run_id, columns, f"{name}.json")

    def close(self, error: str | None) -> None:
        if error is not None:
            self._client.log_text(self._run_id, error, "error.txt")
        self._client.set_terminated(self._run_id, "FINISHED" if error is None else "FAILED")
