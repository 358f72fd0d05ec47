"""Which sinks receive a run's metrics, chosen by `trainer.logger` (one name or a list)."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


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


def check_names(names: Sequence[str]) -> None:
    """ValueError names the unknown tracker, the known ones and the nearest."""
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"trainer.logger={name!r}: known trackers are {', '.join(sorted(TRACKERS))}{hint}")


def open_trackers(cfg: Any, log_folder: Path) -> TrackerSet:
    """Opens every tracker of `trainer.logger`; each gets (cfg, log_folder)."""
    names = [cfg.trainer.logger] if isinstance(cfg.trainer.logger, str) else list(cfg.trainer.logger)
    check_names(names)
    return TrackerSet([_load(name)(cfg, log_folder) for name in names])


def _load(name: str) -> type:
    module, attribute = TRACKERS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
