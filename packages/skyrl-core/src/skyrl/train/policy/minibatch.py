"""What must be known of a whole mini-batch before it is cut: normalised advantages, token weights, counts."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.advantages import normalise
from skyrl.train.algorithms.anchors import (
    anchored_on_rollout,
    corrects_off_policy,
    needs_old_logprobs,
    sampled_logprobs,
)
from skyrl.train.algorithms.losses.covariance import SELECTIONS
from skyrl.train.algorithms.off_policy import correction
from skyrl.train.algorithms.reductions import loss_weights, sequence_mean
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import Normalisers


def prepare_for_critic(
    minibatch: TrajectoryBatch, algorithm: Any, *, world_size: int
) -> tuple[TrajectoryBatch, Normalisers]:
    """The mini-batch with `loss_weights_T`, and its counts. ValueError where it has no returns or no values yet."""
    minibatch.require("returns_T")
    minibatch.require("values_T")
    num_tokens = float(minibatch.loss_mask_T.double().sum())
    prepared = minibatch.with_tensors(loss_weights_T=sequence_mean(minibatch, algorithm))
    return prepared, Normalisers(num_tokens, minibatch.num_sequences, world_size)


def needs_present_logprobs(algorithm: Any) -> bool:
    """Whether `prepare` must be given the mini-batch's logprobs under the present weights."""
    return algorithm.policy_loss_type in SELECTIONS


def prepare(
    minibatch: TrajectoryBatch,
    algorithm: Any,
    *,
    world_size: int,
    micro_batch_size: int = 1,
    present_logprobs_T: torch.Tensor | None = None,
) -> tuple[TrajectoryBatch, Normalisers]:
    """The mini-batch with `loss_weights_T`, `kl_weights_T` and, for losses that choose tokens, `selected_T`; its counts
    and the metrics that are known already.

    ValueError when a tensor that the loss needs is missing, or the servers gave no logprob that it needs.
    """
    if needs_old_logprobs(algorithm):
        minibatch.require("old_logprobs_T")
    if anchored_on_rollout(algorithm):
        loss = f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}"
        sampled_logprobs(minibatch, key=loss, instead="take a loss that is anchored on the old logprobs")
    if algorithm.use_kl_loss:
        minibatch.require("ref_logprobs_T")
    if algorithm.advantage_batch_normalize:
        advantages_T = normalise(minibatch.require("advantages_T"), minibatch.loss_mask_T)
        minibatch = minibatch.with_tensors(advantages_T=advantages_T)
    minibatch.require("advantages_T")
    weights_T = loss_weights(minibatch, algorithm, micro_batch_size=micro_batch_size)
    found: dict[str, float] = {}
    if corrects_off_policy(algorithm):
        factors_T, found = correction(minibatch, algorithm)
        weights_T = weights_T * factors_T
    prepared = minibatch.with_tensors(loss_weights_T=weights_T, kl_weights_T=sequence_mean(minibatch, algorithm))
    if needs_present_logprobs(algorithm):
        assert present_logprobs_T is not None, "the loss chooses tokens by their present logprobs"
        select = SELECTIONS[algorithm.policy_loss_type]
        prepared = prepared.with_tensors(selected_T=select(minibatch, present_logprobs_T, algorithm))
    known = {f"policy/loss_metrics/{name}": value for name, value in found.items()}
    num_tokens = float(minibatch.loss_mask_T.double().sum())
    return prepared, Normalisers(num_tokens, minibatch.num_sequences, world_size, known)
