"""What must be known of a whole mini-batch before it is cut: normalised advantages, token weights, counts."""

from __future__ import annotations

from typing import Any

from skyrl.train.algorithms.advantages import normalise
from skyrl.train.algorithms.reductions import loss_weights, sequence_mean
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import Normalisers


def prepare(minibatch: TrajectoryBatch, algorithm: Any, *, world_size: int) -> tuple[TrajectoryBatch, Normalisers]:
    """The mini-batch with `loss_weights_T` and `kl_weights_T`, and its counts. ValueError when a tensor that
    the loss needs is missing."""
    minibatch.require("old_logprobs_T")
    if algorithm.use_kl_loss:
        minibatch.require("ref_logprobs_T")
    advantages_T = minibatch.require("advantages_T")
    if algorithm.advantage_batch_normalize:
        advantages_T = normalise(advantages_T, minibatch.loss_mask_T)
    prepared = minibatch.with_tensors(
        advantages_T=advantages_T,
        loss_weights_T=loss_weights(minibatch, algorithm),
        kl_weights_T=sequence_mean(minibatch, algorithm),
    )
    num_tokens = float(minibatch.loss_mask_T.double().sum())
    return prepared, Normalisers(num_tokens, minibatch.num_sequences, world_size)
