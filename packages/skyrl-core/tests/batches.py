"""Small flat batches, built by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from skyrl.train.policy.batch import TrajectoryBatch


def batch_of(
    rewards: Sequence[Sequence[float]],
    *,
    groups: Sequence[int],
    masks: Sequence[Sequence[float]] | None = None,
    prompt_len: int = 2,
) -> TrajectoryBatch:
    """One sequence per list of per-token rewards; token ids count up from 0."""
    lens = [len(r) for r in rewards]
    flat_mask = [m for mask in masks for m in mask] if masks is not None else [1.0] * sum(lens)
    total = sum(lens) + prompt_len * len(lens)
    return TrajectoryBatch(
        token_ids_N=torch.arange(total),
        seq_lens_S=torch.tensor(lens) + prompt_len,
        prompt_lens_S=torch.full((len(lens),), prompt_len),
        group_ids_S=torch.tensor(groups),
        loss_mask_T=torch.tensor(flat_mask),
        rewards_T=torch.tensor([x for r in rewards for x in r]),
        rollout_logprobs_T=torch.zeros(sum(lens)),
        weight_versions_T=torch.zeros(sum(lens), dtype=torch.int64),
    )
