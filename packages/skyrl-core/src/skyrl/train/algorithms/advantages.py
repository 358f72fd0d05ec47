"""How much better than its group each sample was, as one number per response token.

An estimator takes a `TrajectoryBatch` and the algorithm's config and returns (advantages_T, returns_T), float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyrl.train.algorithms.segments import dense_ids, segment_sum
from skyrl.train.algorithms.tables import Table
from skyrl.train.policy.batch import TrajectoryBatch

Estimator = Callable[[TrajectoryBatch, Any], tuple[torch.Tensor, torch.Tensor]]

STD_EPS = 1e-6
MIN_VARIANCE = 1e-8


def grpo(batch: TrajectoryBatch, algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantage, DeepSeekMath (arXiv 2402.03300), eq. in section 4.1.2:

        A_i = (s_i - mean_g) / (std_g + 1e-6),   s_i = sum_t r_(i,t)

    with the sample standard deviation (divisor n - 1) of the group, and without the division when `grpo_norm_by_std` is
    false (Dr. GRPO, arXiv 2503.20783). A group of one has no baseline: A = s. Every trained token of a sample gets its
    A; returns equal advantages.
    """
    scores_S = scores(batch)
    groups_S, num_groups = dense_ids(batch.group_ids_S)
    ones_S = torch.ones_like(scores_S)
    count_G = segment_sum(ones_S, groups_S, num_groups)
    mean_G = segment_sum(scores_S, groups_S, num_groups) / count_G
    centred_S = scores_S - mean_G[groups_S]
    var_G = segment_sum(centred_S.square(), groups_S, num_groups) / (count_G - 1).clamp(min=1)
    normalised_S = centred_S / (var_G.sqrt()[groups_S] + STD_EPS) if algorithm.grpo_norm_by_std else centred_S
    single_S = count_G[groups_S] == 1
    advantages_T = _per_token(torch.where(single_S, scores_S, normalised_S), batch)
    return advantages_T, advantages_T


ADVANTAGE_ESTIMATORS: Table[Estimator] = Table("trainer.algorithm.advantage_estimator", {"grpo": grpo})


def register_advantage_estimator(name: str, estimator: Estimator) -> Estimator:
    """Makes `trainer.algorithm.advantage_estimator=name` mean this function."""
    return ADVANTAGE_ESTIMATORS.register(name, estimator)


def estimate(batch: TrajectoryBatch, algorithm: Any) -> TrajectoryBatch:
    """The batch with `advantages_T` and `returns_T` of the configured estimator. ValueError for an unknown name."""
    advantages_T, returns_T = ADVANTAGE_ESTIMATORS.pick(algorithm.advantage_estimator)(batch, algorithm)
    return batch.with_tensors(advantages_T=advantages_T, returns_T=returns_T)


def scores(batch: TrajectoryBatch) -> torch.Tensor:
    """float64 [S]: the sum of each sample's rewards."""
    return segment_sum(batch.rewards_T.double(), batch.segment_ids_T, batch.num_sequences)


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


def _per_token(values_S: torch.Tensor, batch: TrajectoryBatch) -> torch.Tensor:
    return (values_S[batch.segment_ids_T] * batch.loss_mask_T).float()
