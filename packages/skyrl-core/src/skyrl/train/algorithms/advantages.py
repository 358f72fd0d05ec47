"""How much better than expected each sample was, as one number per response token, by the estimator that a name means.

An estimator takes a `TrajectoryBatch` and the algorithm's config and returns (advantages_T, returns_T), float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyrl.train.algorithms.episodes import last_steps, last_tokens
from skyrl.train.algorithms.estimators.gae import gae
from skyrl.train.algorithms.estimators.group_relative import grpo, maxrl, rloo
from skyrl.train.algorithms.estimators.reinforce_plus_plus import reinforce_plus_plus
from skyrl.train.algorithms.padded import as_estimator
from skyrl.train.algorithms.tables import Table
from skyrl.train.policy.batch import TrajectoryBatch

Estimator = Callable[[TrajectoryBatch, Any], tuple[torch.Tensor, torch.Tensor]]

MIN_VARIANCE = 1e-8

ADVANTAGE_ESTIMATORS: Table[Estimator] = Table(
    "trainer.algorithm.advantage_estimator",
    {"grpo": grpo, "rloo": rloo, "maxrl": maxrl, "reinforce++": reinforce_plus_plus, "gae": gae},
    adapted=as_estimator,
)


def register_advantage_estimator(name: str, estimator: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Makes `trainer.algorithm.advantage_estimator=name` mean this function: an `Estimator`, or one of the public form
    (`padded.PaddedEstimator`). Without `estimator` it decorates the function. ValueError for a name that is taken."""
    return ADVANTAGE_ESTIMATORS.register(name, estimator)


def estimate(batch: TrajectoryBatch, algorithm: Any) -> TrajectoryBatch:
    """The batch with `advantages_T` and `returns_T` of the configured estimator. ValueError for an unknown name.

    Where each turn is a sample of its own, the estimator sees one sequence an episode, its last step with the episode's
    total reward, and every trained token of all its steps gets what the estimator gives that step's last token.
    """
    estimator = ADVANTAGE_ESTIMATORS.pick(algorithm.advantage_estimator)
    if batch.trajectory_ids_S is not None:
        advantages_T, returns_T = _of_episodes(batch, algorithm, estimator)
    else:
        advantages_T, returns_T = estimator(batch, algorithm)
    return batch.with_tensors(advantages_T=advantages_T, returns_T=returns_T)


def _of_episodes(batch: TrajectoryBatch, algorithm: Any, estimator: Estimator) -> tuple[torch.Tensor, torch.Tensor]:
    lasts, episodes_S = last_steps(batch)
    episodes_T, at_E = episodes_S[batch.segment_ids_T], last_tokens(lasts)
    advantages_T, returns_T = (values[at_E][episodes_T] * batch.loss_mask_T for values in estimator(lasts, algorithm))
    return advantages_T, returns_T


def normalise(advantages_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """`advantage_batch_normalize`: (A - mean) / sqrt(max(var, 1e-8)), mean and variance (divisor: the count) over the
    trained tokens of the mini-batch. Public SkyRL takes the mean over padding too (its issue 1305); this one does not.
    """
    mask_T = loss_mask_T.double()
    count = mask_T.sum().clamp(min=1)
    mean = (advantages_T.double() * mask_T).sum() / count
    centred_T = advantages_T.double() - mean
    variance = (centred_T.square() * mask_T).sum() / count
    return (centred_T * variance.clamp(min=MIN_VARIANCE).rsqrt() * mask_T).to(advantages_T.dtype)
