"""Advantages of whole samples against the other samples of their prompt: one number for all tokens of a sample.

With s_i = sum_t r_(i,t), the total reward of sample i, and n samples in its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from skyrl.train.algorithms.segments import dense_ids, segment_sum
from skyrl.train.policy.batch import TrajectoryBatch

EPS = 1e-6

Advantages = tuple[torch.Tensor, torch.Tensor]


def grpo(batch: TrajectoryBatch, algorithm: Any) -> Advantages:
    """Group-relative advantage, DeepSeekMath (arXiv 2402.03300), eq. in section 4.1.2:

        A_i = (s_i - mean_g) / (std_g + 1e-6)

    with the sample standard deviation (divisor n - 1) of the group, and without the division when `grpo_norm_by_std` is
    false (Dr. GRPO, arXiv 2503.20783). A group of one has no baseline: A = s. Every trained token of a sample gets its
    A; returns equal advantages.
    """
    group = _Groups.of(batch)
    var_G = group.sum(group.centred_S.square()) / (group.count_G - 1).clamp(min=1)
    normalised_S = group.centred_S / (var_G.sqrt()[group.ids_S] + EPS)
    relative_S = normalised_S if algorithm.grpo_norm_by_std else group.centred_S
    return _per_token(torch.where(group.single_S, group.scores_S, relative_S), batch)


def rloo(batch: TrajectoryBatch, _algorithm: Any) -> Advantages:
    """Leave-one-out baseline (RLOO, arXiv 2402.14740): A_i = s_i - mean of the others = (s_i - mean_g) n / (n - 1).

    A group of one has no others: A = 0.
    """
    group = _Groups.of(batch)
    factor_S = (group.count_G / (group.count_G - 1).clamp(min=1))[group.ids_S]
    return _per_token(torch.where(group.single_S, torch.zeros_like(factor_S), group.centred_S * factor_S), batch)


def maxrl(batch: TrajectoryBatch, _algorithm: Any) -> Advantages:
    """Maximum-likelihood RL (arXiv 2602.02710), for rewards that are not negative:

        A_i = (s_i - mean_g) / (mean_g + 1e-6)

    With rewards 0 and 1 its mean gradient approaches that of log P(correct) as n grows. A group of one has no baseline:
    A = s.
    """
    group = _Groups.of(batch)
    relative_S = group.centred_S / (group.mean_G[group.ids_S] + EPS)
    return _per_token(torch.where(group.single_S, group.scores_S, relative_S), batch)


@dataclass(frozen=True)
class _Groups:
    """Scores of the samples, float64, and what their groups have in common."""

    scores_S: torch.Tensor
    ids_S: torch.Tensor
    count_G: torch.Tensor
    mean_G: torch.Tensor

    @staticmethod
    def of(batch: TrajectoryBatch) -> _Groups:
        scores_S = segment_sum(batch.rewards_T.double(), batch.segment_ids_T, batch.num_sequences)
        ids_S, num_groups = dense_ids(batch.group_ids_S)
        count_G = segment_sum(torch.ones_like(scores_S), ids_S, num_groups)
        return _Groups(scores_S, ids_S, count_G, segment_sum(scores_S, ids_S, num_groups) / count_G)

    @property
    def centred_S(self) -> torch.Tensor:
        return self.scores_S - self.mean_G[self.ids_S]

    @property
    def single_S(self) -> torch.Tensor:
        return self.count_G[self.ids_S] == 1

    def sum(self, values_S: torch.Tensor) -> torch.Tensor:
        return segment_sum(values_S, self.ids_S, self.count_G.numel())


def _per_token(values_S: torch.Tensor, batch: TrajectoryBatch) -> Advantages:
    advantages_T = (values_S[batch.segment_ids_T] * batch.loss_mask_T).float()
    return advantages_T, advantages_T
