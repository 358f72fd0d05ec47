"""The KL penalty on the reward of each token, and how its coefficient follows the KL that is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyrl.train.algorithms.kl import token_kl
from skyrl.train.algorithms.segments import segment_sum
from skyrl.train.algorithms.tables import Table
from skyrl.train.policy.batch import TrajectoryBatch

KlControl = Callable[[float, float, int, Any], float]

ERROR_LIMIT = 0.2


def fixed(coefficient: float, _kl: float, _num_samples: int, _settings: Any) -> float:
    """The coefficient stays what it is."""
    return coefficient


def adaptive(coefficient: float, kl: float, num_samples: int, settings: Any) -> float:
    """Proportional control in the logarithm (Ziegler et al., arXiv 1909.08593):

    coefficient (1 + clip(kl / kl_target - 1, -0.2, 0.2) num_samples / horizon)
    """
    error = min(max(kl / settings.kl_target - 1, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * (1 + error * num_samples / settings.horizon)


KL_CONTROLS: Table[KlControl] = Table("trainer.algorithm.kl_ctrl.type", {"fixed": fixed, "adaptive": adaptive})


def penalise(batch: TrajectoryBatch, algorithm: Any, coefficient: float) -> tuple[TrajectoryBatch, dict[str, float]]:
    """(the batch with r_t - max(0, coefficient) x KL_t as rewards, metrics), KL_t the estimate of `kl_estimator_type`
    from the policy before the update and the reference, on trained tokens. `adaptive` can leave a coefficient below 0
    where one step has more than 5 horizons of samples: distance from the reference is never rewarded.

    loss/avg_kl is the mean over sequences of each one's mean KL, loss/avg_kl_max that of each one's largest |KL|,
    loss/kl_loss_coef the coefficient used.
    """
    old_T, ref_T = batch.require("old_logprobs_T").double(), batch.require("ref_logprobs_T").double()
    kl_T = token_kl(old_T, ref_T, batch.loss_mask_T, estimator=algorithm.kl_estimator_type)
    rewards_T = batch.rewards_T.double() - max(0.0, coefficient) * kl_T
    penalised = batch.with_tensors(rewards_T=rewards_T.to(batch.rewards_T.dtype))
    size, segments_T = batch.num_sequences, batch.segment_ids_T
    tokens_S = segment_sum(batch.loss_mask_T.double(), segments_T, size).clamp(min=1)
    largest_S = torch.zeros(size, dtype=kl_T.dtype).scatter_reduce(0, segments_T, kl_T.abs(), "amax")
    return penalised, {
        "loss/avg_kl": float((segment_sum(kl_T, segments_T, size) / tokens_S).mean()),
        "loss/avg_kl_max": float(largest_S.mean()),
        "loss/kl_loss_coef": coefficient,
    }


def next_coefficient(coefficient: float, kl: float, num_samples: int, algorithm: Any) -> float:
    """The coefficient of the next step, after `num_samples` samples with a mean KL of `kl`."""
    settings = algorithm.kl_ctrl
    return KL_CONTROLS.pick(settings.type)(coefficient, kl, num_samples, settings)


def resumed_coefficient(stored: float, algorithm: Any) -> float:
    """The coefficient of a resumed run's first step: what `next_coefficient` had come to, but a fixed one is what the
    configuration now says."""
    return algorithm.kl_loss_coef if algorithm.kl_ctrl.type == "fixed" else stored
