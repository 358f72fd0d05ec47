"""How much each token's loss counts: weights [T] such that a plain sum over any split of the mini-batch is the loss.

They are computed once over the whole mini-batch, so gradients do not depend on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyrl.train.algorithms.segments import dense_ids, segment_sum
from skyrl.train.algorithms.tables import Table
from skyrl.train.policy.batch import TrajectoryBatch

Reduction = Callable[[TrajectoryBatch, Any], torch.Tensor]
"""(mini-batch, algorithm) -> float64 [T]."""

MICRO_BATCHED = "token_mean_legacy"
"""The reduction that is defined by micro-batches: it takes their size as a third argument."""


def token_mean(batch: TrajectoryBatch, _algorithm: Any) -> torch.Tensor:
    """mask / trained tokens of the mini-batch (DAPO, arXiv 2503.14476, eq. 8)."""
    mask_T = batch.loss_mask_T.double()
    return mask_T / mask_T.sum().clamp(min=1)


def sequence_mean(batch: TrajectoryBatch, _algorithm: Any) -> torch.Tensor:
    """mask / (sequences x trained tokens of the sequence) (GRPO, arXiv 2402.03300, eq. 3)."""
    mask_T, segments_T = batch.loss_mask_T.double(), batch.segment_ids_T
    tokens_S = segment_sum(mask_T, segments_T, batch.num_sequences).clamp(min=1)
    return mask_T / (batch.num_sequences * tokens_S[segments_T])


def seq_mean_token_sum_norm(batch: TrajectoryBatch, algorithm: Any) -> torch.Tensor:
    """mask / (sequences x `max_seq_len`): no length bias (Dr. GRPO, arXiv 2503.20783).

    ValueError without max_seq_len.
    """
    if not algorithm.max_seq_len:
        raise ValueError(
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm divides by trainer.algorithm.max_seq_len: set it"
        )
    return batch.loss_mask_T.double() / (batch.num_sequences * algorithm.max_seq_len)


def prompt_mean(batch: TrajectoryBatch, _algorithm: Any) -> torch.Tensor:
    """mask / (prompts x trained tokens of all the prompt's samples)."""
    mask_T = batch.loss_mask_T.double()
    groups_S, num_groups = dense_ids(batch.group_ids_S)
    groups_T = groups_S[batch.segment_ids_T]
    tokens_G = segment_sum(mask_T, groups_T, num_groups).clamp(min=1)
    return mask_T / (num_groups * tokens_G[groups_T])


def token_mean_legacy(batch: TrajectoryBatch, _algorithm: Any, micro_batch_size: int = 1) -> torch.Tensor:
    """mask / (micro-batches x trained tokens of the micro-batch): the mean over micro-batches of their token means.

    A micro-batch is `trainer.micro_train_batch_size_per_gpu` neighbouring sequences of the mini-batch, the last one
    what is left of it (public SkyRL drops that rest from the loss). How a backend really cuts the mini-batch, by
    length, by tokens or over ranks, changes nothing.
    """
    mask_T = batch.loss_mask_T.double()
    micros_S = torch.arange(batch.num_sequences, device=mask_T.device) // micro_batch_size
    num_micros = -(-batch.num_sequences // micro_batch_size)
    micros_T = micros_S[batch.segment_ids_T]
    tokens_M = segment_sum(mask_T, micros_T, num_micros).clamp(min=1)
    return mask_T / (num_micros * tokens_M[micros_T])


LOSS_REDUCTIONS: Table[Reduction] = Table(
    "trainer.algorithm.loss_reduction",
    {
        "token_mean": token_mean,
        "token_mean_legacy": token_mean_legacy,
        "sequence_mean": sequence_mean,
        "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
        "prompt_mean": prompt_mean,
    },
)


def loss_weights(batch: TrajectoryBatch, algorithm: Any, *, micro_batch_size: int = 1) -> torch.Tensor:
    """float64 [T] of the configured reduction. ValueError for an unknown name.

    `micro_batch_size` is `trainer.micro_train_batch_size_per_gpu`, which only `token_mean_legacy` looks at.
    """
    if algorithm.loss_reduction == MICRO_BATCHED:
        return token_mean_legacy(batch, algorithm, micro_batch_size)
    return LOSS_REDUCTIONS.pick(algorithm.loss_reduction)(batch, algorithm)
