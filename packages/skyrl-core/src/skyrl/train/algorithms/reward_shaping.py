"""What is done to rewards and masks before advantages are estimated: overlong answers cost, groups without a difference
between their samples are left out of the loss.

A batch is shaped once, whole; `reward/avg_raw_reward` stays what the environments gave.
"""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.episodes import episodes_of
from skyrl.train.algorithms.segments import dense_ids, segment_sum
from skyrl.train.policy.batch import TrajectoryBatch

Metrics = dict[str, float]


def shape(batch: TrajectoryBatch, algorithm: Any, *, max_response_len: int) -> tuple[TrajectoryBatch, Metrics]:
    """(the batch as the algorithm wants it, metrics). `max_response_len` is what a response may have at most."""
    metrics: Metrics = {}
    if algorithm.overlong_buffer_len:
        batch, metrics = punish_overlong(batch, algorithm, max_response_len=max_response_len)
    if algorithm.zero_variance_filter:
        batch, found = mask_zero_variance(batch, tolerance=algorithm.zero_variance_filter_tol)
        metrics |= found
    return batch, metrics


def punish_overlong(
    batch: TrajectoryBatch, algorithm: Any, *, max_response_len: int
) -> tuple[TrajectoryBatch, Metrics]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), with L = `max_response_len` and B =
    `overlong_buffer_len`: a response of n tokens, L - B < n <= L, loses `overlong_buffer_penalty_factor`
    (n - (L - B)) / B of reward on its last trained token; a longer one has reward 0.

    reward/avg_overlong_penalty is what a response lost at the mean.
    """
    buffer, factor = algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor
    lens_S = batch.response_lens_S.double()
    penalty_S = (lens_S - (max_response_len - buffer)).clamp(min=0) / buffer * factor
    before_S = segment_sum(batch.rewards_T.double(), batch.segment_ids_T, batch.num_sequences)
    rewards_T = batch.rewards_T.double().index_add(0, _last_trained(batch), -penalty_S)
    too_long_T = (lens_S > max_response_len)[batch.segment_ids_T]
    shaped = batch.with_tensors(rewards_T=torch.where(too_long_T, 0.0, rewards_T).to(batch.rewards_T.dtype))
    after_S = segment_sum(shaped.rewards_T.double(), batch.segment_ids_T, batch.num_sequences)
    return shaped, {"reward/avg_overlong_penalty": float((before_S - after_S).mean())}


def mask_zero_variance(batch: TrajectoryBatch, *, tolerance: float) -> tuple[TrajectoryBatch, Metrics]:
    """Masks groups of more than one live sample (one with a trained token) whose total rewards differ by no more than
    `tolerance`; the steps of an episode are one sample. It works on token-level rewards as on one reward per response,
    where public SkyRL's does nothing.

    reward/num_zero_variance_filtered counts these groups.
    """
    episodes_S, num_episodes = episodes_of(batch)
    episodes_T = episodes_S[batch.segment_ids_T]
    scores_E = segment_sum(batch.rewards_T.double(), episodes_T, num_episodes)
    live_E = segment_sum(batch.loss_mask_T, episodes_T, num_episodes) > 0
    groups_S, num_groups = dense_ids(batch.group_ids_S)
    groups_E = torch.zeros(num_episodes, dtype=torch.int64).scatter(0, episodes_S, groups_S)
    count_G = segment_sum(live_E.long(), groups_E, num_groups)
    spread_G = _largest(scores_E, live_E, groups_E, num_groups) + _largest(-scores_E, live_E, groups_E, num_groups)
    flat_G = (count_G > 1) & (spread_G <= tolerance)
    kept_T = ~flat_G[groups_S][batch.segment_ids_T]
    masked = batch.with_tensors(loss_mask_T=batch.loss_mask_T * kept_T)
    return masked, {"reward/num_zero_variance_filtered": float(flat_G.sum())}


def _last_trained(batch: TrajectoryBatch) -> torch.Tensor:
    """[S]: where each response's last trained token lies in [T]; its last token where none is trained on."""
    ends_S = torch.cumsum(batch.response_lens_S, 0)
    positions_T = torch.arange(batch.loss_mask_T.numel())
    candidates_T = torch.where(batch.loss_mask_T > 0, positions_T, -1)
    last_S = torch.full_like(ends_S, -1).scatter_reduce(0, batch.segment_ids_T, candidates_T, "amax")
    return torch.where(last_S >= 0, last_S, ends_S - 1)


def _largest(scores_S: torch.Tensor, live_S: torch.Tensor, groups_S: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[G]: the largest score of the live samples, -inf where none lives."""
    lowest = torch.full((num_groups,), -torch.inf, dtype=scores_S.dtype)
    return lowest.scatter_reduce(0, groups_S, torch.where(live_S, scores_S, -torch.inf), "amax")
