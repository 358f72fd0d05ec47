"""A policy that sleeps instead of training (`trainer.fully_async.simulate_training`), to measure rollout servers.

Its weights are real and are really published; they never change.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from skyrl_rollout.weights.publisher import PublishReport

from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import LossSpec


class SimulatedPolicy:
    """Stands before a `PolicyGroup`: an update takes `step_s` seconds and a publish `sync_s` longer than it does."""

    def __init__(self, policy: Any, *, step_s: float, sync_s: float) -> None:
        self._policy, self._step_s, self._sync_s = policy, step_s, sync_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def logprobs(self, batch: TrajectoryBatch, *, temperature: float) -> torch.Tensor:
        """The servers' own: nothing is computed."""
        return batch.rollout_logprobs_T

    def update(self, minibatch: TrajectoryBatch, spec: LossSpec) -> dict[str, float]:
        time.sleep(self._step_s)
        return {}

    def publish(self, *args: Any, **kwargs: Any) -> PublishReport:
        time.sleep(self._sync_s)
        return self._policy.publish(*args, **kwargs)

    def publish_adapter(self, *args: Any, **kwargs: Any) -> PublishReport:
        time.sleep(self._sync_s)
        return self._policy.publish_adapter(*args, **kwargs)


def simulated(cfg: Any, policy: Any) -> Any:
    """The policy itself, or one that only sleeps where the configuration asks for it."""
    settings = cfg.trainer.fully_async
    if cfg.trainer.mode != "fully_async" or not settings.simulate_training:
        return policy
    return SimulatedPolicy(
        policy, step_s=settings.simulate_training_step_seconds, sync_s=settings.simulate_weight_sync_seconds
    )
