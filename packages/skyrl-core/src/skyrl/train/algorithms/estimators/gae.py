"""Generalised advantage estimation: what a sampled token changed in the value that a critic sees ahead."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.estimators.sampled_steps import SampledSteps
from skyrl.train.policy.batch import TrajectoryBatch


def gae(batch: TrajectoryBatch, algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(arXiv 1506.02438, eq. 11 and 16) over the tokens that the policy sampled, with the critic's `values_T`:

        d_t = r_t + gamma V_(t+1) - V_t,   A_t = d_t + gamma lambda A_(t+1)

    Behind the last token V and A are 0. Returns are A + V; the advantages are then whitened over all trained tokens of
    the batch (variance with divisor n - 1, + 1e-8). ValueError without values.
    """
    steps = SampledSteps(batch)
    rewards_SK, values_SK = steps.total(batch.rewards_T), steps.own(batch.require("values_T"))
    advantages_SK = torch.zeros_like(values_SK)
    next_value_S = next_advantage_S = torch.zeros(steps.shape[0], dtype=torch.float64)
    for k in reversed(range(steps.shape[1])):
        delta_S = rewards_SK[:, k] + algorithm.gamma * next_value_S - values_SK[:, k]
        next_advantage_S = delta_S + algorithm.gamma * algorithm.lambd * next_advantage_S
        next_value_S = values_SK[:, k]
        advantages_SK[:, k] = next_advantage_S
    advantages_T = steps.per_token(advantages_SK)
    returns_T = steps.per_token(advantages_SK + values_SK)
    return steps.whiten(advantages_T).float(), returns_T.float()
