"""Token weights worked out by hand."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.reductions import loss_weights
from skyrl.train.config import AlgorithmConfig
from skyrl.train.policy.minibatch import prepare
from torch.testing import assert_close

# three sequences with 2, 1 and 3 trained tokens; the first two belong to one prompt
BATCH = batch_of([[0, 0, 0], [0], [0, 0, 0]], groups=[5, 5, 9], masks=[[1, 0, 1], [1], [1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean", [1 / 6, 0, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9]),
        ("seq_mean_token_sum_norm", [1 / 30, 0, 1 / 30, 1 / 30, 1 / 30, 1 / 30, 1 / 30]),
        ("prompt_mean", [1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6]),
    ],
)
def test_each_reduction_weighs_tokens_by_its_formula(name, expected):
    weights = loss_weights(BATCH, AlgorithmConfig(loss_reduction=name, max_seq_len=10))
    assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_a_sequence_without_trained_tokens_counts_as_a_sequence_and_adds_nothing():
    batch = batch_of([[0.0], [0.0]], groups=[0, 1], masks=[[0], [1]])
    weights = loss_weights(batch, AlgorithmConfig(loss_reduction="sequence_mean"))
    assert_close(weights, torch.tensor([0.0, 0.5], dtype=torch.float64))


def test_the_sum_norm_needs_its_divisor():
    with pytest.raises(ValueError, match="max_seq_len"):
        loss_weights(BATCH, AlgorithmConfig(loss_reduction="seq_mean_token_sum_norm"))


def test_an_unknown_reduction_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="loss_reduction=tokenmean: known: .*did you mean token_mean"):
        loss_weights(BATCH, AlgorithmConfig(loss_reduction="tokenmean"))


# Four sequences with 2, 1, 3 and 0 trained tokens, and a fifth with 1
FIVE = batch_of(
    [[0, 0, 0], [0], [0, 0, 0], [0, 0], [0]],
    groups=[5, 5, 9, 9, 9],
    masks=[[1, 0, 1], [1], [1, 1, 1], [0, 0], [1]],
)


@pytest.mark.parametrize(
    ("micro_batch_size", "expected"),
    [
        (1, [1 / 10, 0, 1 / 10, 1 / 5, 1 / 15, 1 / 15, 1 / 15, 0, 0, 1 / 5]),
        # token means over sequences (0, 1), (2, 3) and what is left, (4): 3, 3 and 1 tokens
        (2, [1 / 9, 0, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 0, 0, 1 / 3]),
        (64, [1 / 7, 0, 1 / 7, 1 / 7, 1 / 7, 1 / 7, 1 / 7, 0, 0, 1 / 7]),
    ],
)
def test_the_legacy_token_mean_is_defined_by_the_size_of_micro_batches(micro_batch_size, expected):
    algorithm = AlgorithmConfig(loss_reduction="token_mean_legacy")
    weights = loss_weights(FIVE, algorithm, micro_batch_size=micro_batch_size)
    assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert_close(
        prepare(WITH_TENSORS, algorithm, world_size=1, micro_batch_size=micro_batch_size)[0].loss_weights_T, weights
    )


WITH_TENSORS = FIVE.with_tensors(
    old_logprobs_T=torch.zeros(10), ref_logprobs_T=torch.zeros(10), advantages_T=torch.zeros(10)
)
