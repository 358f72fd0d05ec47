"""Which sinks receive a run's metrics, chosen by `trainer.logger`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from skyrl.train.config.problems import listed


class Tracker(Protocol):
    """A sink of numbers by step."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


TRACKERS = {
    "console": "skyrl.train.trackers.console:ConsoleTracker",
    "jsonl": "skyrl.train.trackers.jsonl:JsonlTracker",
    "tensorboard": "skyrl.train.trackers.tensorboard:TensorBoardTracker",
    "wandb": "skyrl.train.trackers.wandb:WandbTracker",
    "mlflow": "skyrl.train.trackers.mlflow:MlflowTracker",
}


class TrackerSet:
    """Several trackers as one. A tracker that fails stops the run: metrics are never lost without a word."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, metrics: dict[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def open_trackers(cfg: Any, log_folder: Path) -> TrackerSet:
    """Opens every tracker of `trainer.logger`; each gets (cfg, log_folder). ValueError for an unknown name."""
    return TrackerSet([_load(name)(cfg, log_folder) for name in cfg.trainer.logger])


def _load(name: str) -> type:
    if name not in TRACKERS:
        raise ValueError(f"trainer.logger={name}: {listed(name, TRACKERS)}")
    module, attribute = TRACKERS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
