"""Token weights worked out by hand, and the promise that no split of a mini-batch changes its gradient."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from skyrl.train.algorithms.objective import micro_loss
from skyrl.train.algorithms.reductions import LOSS_REDUCTIONS, loss_weights
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


@st.composite
def minibatches(draw):
    """A mini-batch with every tensor that a loss may look at, and a way to cut it."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    masks = [[float(draw(st.booleans())) for _ in range(n)] for n in sizes]
    groups = [draw(st.integers(0, 3)) for _ in sizes]
    batch = batch_of([[0.0] * n for n in sizes], groups=groups, masks=masks)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(shift):
        return shift + torch.randn(sum(sizes), generator=rng)

    batch = batch.with_tensors(old_logprobs_T=normal(-2), ref_logprobs_T=normal(-2), advantages_T=normal(0))
    part_of = [draw(st.integers(0, 3)) for _ in sizes]
    parts = [[s for s, p in enumerate(part_of) if p == part] for part in range(4)]
    return batch, [part for part in parts if part]


@settings(max_examples=60, deadline=None)
@given(
    case=minibatches(),
    reduction=st.sampled_from(list(LOSS_REDUCTIONS)),
    loss=st.sampled_from(["regular", "dual_clip"]),
    normalise=st.booleans(),
)
def test_any_split_of_a_minibatch_has_the_same_gradient_and_metrics(case, reduction, loss, normalise):
    batch, parts = case
    algorithm = AlgorithmConfig(
        loss_reduction=reduction,
        policy_loss_type=loss,
        max_seq_len=16,
        advantage_batch_normalize=normalise,
        use_entropy_loss=True,
    )
    prepared, normalisers = prepare(batch, algorithm, world_size=1)

    def total(cuts):
        logprobs = torch.linspace(-3, -1, batch.loss_mask_T.numel(), dtype=torch.float64).requires_grad_()
        entropy = torch.linspace(0.5, 1.5, logprobs.numel(), dtype=torch.float64).requires_grad_()
        metrics = {}
        for cut in cuts:
            index = batch.response_index(cut)
            share, found = micro_loss(
                prepared.select(cut), logprobs[index], entropy[index], algorithm, num_tokens=normalisers.num_tokens
            )
            share.backward()
            metrics = {name: metrics.get(name, 0.0) + value for name, value in found.items()}
        return logprobs.grad, entropy.grad, metrics

    whole, split = total([list(range(batch.num_sequences))]), total(parts)
    assert_close(split[0], whole[0], atol=1e-13, rtol=1e-11)
    assert_close(split[1], whole[1], atol=1e-13, rtol=1e-11)
    for name, value in whole[2].items():
        assert_close(split[2][name], value, atol=1e-12, rtol=1e-11)
