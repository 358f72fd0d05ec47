"""What is known of an episode as a whole where each of its turns is a sample of its own.

Public SkyRL estimates advantages from the last turn's reward alone; here the rewards of all turns count, so that an
episode has the advantage that it has as one sample.
"""

from __future__ import annotations

import torch

from skyrl.train.algorithms.segments import dense_ids
from skyrl.train.policy.batch import TrajectoryBatch


def episodes_of(batch: TrajectoryBatch) -> tuple[torch.Tensor, int]:
    """([S] the episode of each sequence from 0, their number): every sequence by itself where it is no step."""
    if batch.trajectory_ids_S is None:
        return torch.arange(batch.num_sequences), batch.num_sequences
    return dense_ids(batch.trajectory_ids_S)


def last_steps(batch: TrajectoryBatch) -> tuple[TrajectoryBatch, torch.Tensor]:
    """(the last step of each episode E, with the episode's total reward on its last token and every token unmasked;
    [S] the episode of each sequence)."""
    episodes_S, num_episodes = episodes_of(batch)
    last_E = torch.zeros(num_episodes, dtype=torch.int64).scatter_reduce(
        0, episodes_S, torch.arange(batch.num_sequences), "amax", include_self=False
    )
    chosen = batch.select(last_E)
    totals_E = torch.zeros(num_episodes, dtype=torch.float64).index_add(
        0, episodes_S[batch.segment_ids_T], batch.rewards_T.double()
    )
    rewards_T = torch.zeros_like(chosen.rewards_T, dtype=torch.float64)
    rewards_T[last_tokens(chosen)] = totals_E
    masks_T = torch.ones_like(chosen.loss_mask_T)
    # in float64, so that the sum is the one that an estimator makes of a whole episode
    return chosen.with_tensors(rewards_T=rewards_T, loss_mask_T=masks_T), episodes_S


def last_tokens(batch: TrajectoryBatch) -> torch.Tensor:
    """[S]: where each response's last token lies in [T]."""
    return torch.cumsum(batch.response_lens_S, 0) - 1
