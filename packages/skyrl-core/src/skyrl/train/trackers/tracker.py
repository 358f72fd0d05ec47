"""Which sinks receive a run's metrics, chosen by `trainer.logger`, and what becomes of one that fails."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from skyrl.train.config.problems import listed
from skyrl.train.failures import RunFailed
from skyrl.train.trackers.in_thread import InThread

log = logging.getLogger(__name__)
FAILURES = "trainer/num_tracker_failures"


class Tracker(Protocol):
    """A sink of numbers and of tables of trajectories, by step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Rows that share their columns, under a name such as `trajectories/eval`; given before the step's metrics."""
        ...

    def close(self, error: str | None) -> None:
        """`error` is what ended the run, None after success."""
        ...


TRACKERS = {
    "console": "skyrl.train.trackers.console:ConsoleTracker",
    "jsonl": "skyrl.train.trackers.jsonl:JsonlTracker",
    "tensorboard": "skyrl.train.trackers.tensorboard:TensorBoardTracker",
    "wandb": "skyrl.train.trackers.wandb:WandbTracker",
    "mlflow": "skyrl.train.trackers.mlflow:MlflowTracker",
}
# They may wait for a network: a thread of their own does.
REMOTE = frozenset({"wandb", "mlflow"})


class TrackerSet:
    """Several trackers as one.

    A tracker that fails is named in the log, counted (`trainer/num_tracker_failures`, which the others get) and asked
    again next time; RunFailed where none of them took a step's metrics, so that metrics are never lost without a word.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self.num_failures = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        failed: dict[str, str] = {}
        for name, tracker in self._trackers.items():
            counted = {FAILURES: float(self.num_failures)} if self.num_failures else {}
            if (
                why := self._told(name, f"the metrics of step {step}", tracker.log, {**metrics, **counted}, step)
            ) is not None:
                failed[name] = why
        if self._trackers and len(failed) == len(self._trackers):
            reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise RunFailed(f"no tracker took the metrics of step {step} ({reasons}): see trainer.logger")

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for tracker_name, tracker in self._trackers.items():
            self._told(tracker_name, f"the table {name} of step {step}", tracker.table, name, rows, step)

    def close(self, error: str | None = None) -> None:
        """Closes every tracker, also where another one cannot be closed."""
        for name, tracker in self._trackers.items():
            self._told(name, "the end of the run", tracker.close, error)
        if self.num_failures:
            log.warning("trackers failed %d times during the run; each is named above", self.num_failures)

    def _told(self, name: str, what: str, work: Callable[..., None], *arguments: Any) -> str | None:
        """None after success, else why not; the failure is logged and counted."""
        try:
            work(*arguments)
            return None
        except Exception as error:
            self.num_failures += 1
            why = f"{type(error).__name__}: {error}"
            log.warning("tracker %s did not take %s (failure %d): %s", name, what, self.num_failures, why)
            return why


def open_trackers(cfg: Any, log_folder: Path) -> TrackerSet:
    """Opens every tracker of `trainer.logger`; each gets (cfg, log_folder).

    Raises ValueError for an unknown name, a client that is not installed and whatever a client says about its settings:
    a run does not begin without a tracker that it was asked for.
    """
    return TrackerSet({name: _opened(name, cfg, log_folder) for name in dict.fromkeys(cfg.trainer.logger)})


def _opened(name: str, cfg: Any, log_folder: Path) -> Tracker:
    if name not in TRACKERS:
        raise ValueError(f"trainer.logger={name}: {listed(name, TRACKERS)}")
    module, attribute = TRACKERS[name].split(":")
    cls = getattr(importlib.import_module(module), attribute)
    try:
        tracker = cls(cfg, log_folder)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"trainer.logger={name} cannot be opened: {type(error).__name__}: {error}") from error
    return InThread(name, tracker) if name in REMOTE else tracker
