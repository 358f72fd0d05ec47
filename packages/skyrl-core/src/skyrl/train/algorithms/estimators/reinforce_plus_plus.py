"""REINFORCE++: discounted rewards-to-go, whitened over the batch, without a group or a critic."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.estimators.sampled_steps import SampledSteps
from skyrl.train.policy.batch import TrajectoryBatch


def reinforce_plus_plus(batch: TrajectoryBatch, algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(arXiv 2501.03262) over the tokens that the policy sampled:

        G_t = r_t + gamma G_(t+1),   A_t = (G_t - mean) / sqrt(var + 1e-8)

    mean and variance (divisor n - 1) over all trained tokens of the batch; returns are G. Public SkyRL takes both over
    observations too.
    """
    steps = SampledSteps(batch)
    rewards_SK = steps.total(batch.rewards_T)
    returns_SK, later_S = torch.zeros_like(rewards_SK), torch.zeros(steps.shape[0], dtype=torch.float64)
    for k in reversed(range(steps.shape[1])):
        later_S = rewards_SK[:, k] + algorithm.gamma * later_S
        returns_SK[:, k] = later_S
    returns_T = steps.per_token(returns_SK)
    return steps.whiten(returns_T).float(), returns_T.float()
