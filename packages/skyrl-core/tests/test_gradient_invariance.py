"""The promise that no split of a mini-batch, over micro-batches or ranks, changes its gradient or its metrics."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from skyrl.train.algorithms.critic import critic_loss
from skyrl.train.algorithms.losses.covariance import SELECTIONS
from skyrl.train.algorithms.objective import micro_loss
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES
from skyrl.train.algorithms.reductions import LOSS_REDUCTIONS
from skyrl.train.config import AlgorithmConfig
from skyrl.train.policy.minibatch import prepare, prepare_for_critic
from skyrl.train.policy.shares import combine
from torch.testing import assert_close

CORRECTIONS = {
    "tis_ratio_type": st.sampled_from([None, "token", "sequence"]),
    "sequence_mask_metric": st.sampled_from([None, "product", "geometric"]),
    "outlier_token_is_threshold_low": st.sampled_from([None, 0.05]),
    "outlier_token_is_threshold_high": st.sampled_from([None, 20.0]),
    "token_mask_is_threshold_high": st.sampled_from([None, 5.0]),
    "geo_mask_low": st.just(0.5),
    "geo_mask_high": st.just(2.0),
}
OTHER_KEYS = {
    "advantage_batch_normalize": st.booleans(),
    "use_kl_loss": st.booleans(),
    "kl_estimator_type": st.sampled_from(["k1", "abs", "k2", "k3"]),
    "use_entropy_loss": st.booleans(),
    "cispo": st.fixed_dictionaries({"cispo_anchor": st.sampled_from(["old", "rollout"])}),
    "dppo": st.fixed_dictionaries({"dppo_type": st.sampled_from(["binary_tv", "binary_kl"])}),
    "clip_cov": st.just({"clip_ratio": 0.3, "clip_cov_lb": 0.1}),
    "off_policy_correction": st.fixed_dictionaries(CORRECTIONS),
}


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

    batch = batch.with_tensors(
        old_logprobs_T=normal(-2), ref_logprobs_T=normal(-2), rollout_logprobs_T=normal(-2), advantages_T=normal(0)
    )
    part_of = [draw(st.integers(0, 3)) for _ in sizes]
    parts = [[s for s, p in enumerate(part_of) if p == part] for part in range(4)]
    return batch, [part for part in parts if part]


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@settings(max_examples=8, deadline=None)
@given(case=minibatches(), keys=st.fixed_dictionaries(OTHER_KEYS), micro_batch_size=st.integers(1, 4))
def test_any_split_of_a_minibatch_has_the_same_gradient_and_metrics(loss, case, keys, micro_batch_size):
    """For every reduction, `token_mean_legacy` too: its micro-batches are slices of the mini-batch, however that is
    really cut."""
    for reduction in LOSS_REDUCTIONS:
        names = {"loss_reduction": reduction, "policy_loss_type": loss, "max_seq_len": 16}
        compare(*case, AlgorithmConfig.model_validate(keys | names), micro_batch_size)


def compare(batch, parts, algorithm, micro_batch_size):
    size = batch.loss_mask_T.numel()
    start = torch.linspace(-3, -1, size, dtype=torch.float64)
    prepared, normalisers = prepare(
        batch,
        algorithm,
        world_size=1,
        micro_batch_size=micro_batch_size,
        present_logprobs_T=start if algorithm.policy_loss_type in SELECTIONS else None,
    )

    def total(cuts):
        logprobs, entropy = start.clone().requires_grad_(), torch.linspace(0.5, 1.5, size, dtype=torch.float64)
        entropy.requires_grad_()
        found = []
        for cut in cuts:
            index = batch.response_index(cut)
            share, metrics = micro_loss(
                prepared.select(cut), logprobs[index], entropy[index], algorithm, num_tokens=normalisers.num_tokens
            )
            share.backward()
            found.append(metrics)
        return logprobs.grad, entropy.grad, combine(found)

    whole, split = total([list(range(batch.num_sequences))]), total(parts)
    assert_same(split[0], whole[0])
    assert (whole[1] is None) == (split[1] is None) == (not algorithm.use_entropy_loss)
    if algorithm.use_entropy_loss:
        assert_same(split[1], whole[1])
    assert split[2] == pytest.approx(whole[2], abs=1e-12, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(case=minibatches(), value_clip=st.sampled_from([None, 0.0, 0.2, 1.0]), shift=st.floats(-2, 2))
def test_any_split_of_a_critics_minibatch_has_the_same_gradient_and_metrics(case, value_clip, shift):
    """Over micro-batches, and over two ranks whose backend takes the mean of their gradients."""
    batch, parts = case
    algorithm = AlgorithmConfig(value_clip=value_clip)
    batch = batch.with_tensors(values_T=batch.old_logprobs_T, returns_T=batch.ref_logprobs_T)
    start = batch.old_logprobs_T.double() + shift

    def total(ranks):
        gradient, found = torch.zeros_like(start), []
        for cuts in ranks:
            values = start.clone().requires_grad_()
            prepared, known = prepare_for_critic(batch, algorithm, world_size=len(ranks))
            for cut in cuts:
                micro = prepared.select(cut)
                loss, metrics = critic_loss(
                    micro, values[batch.response_index(cut)], algorithm, num_tokens=known.num_tokens
                )
                (loss * known.world_size).backward()
                found.append(metrics)
            gradient += (torch.zeros_like(start) if values.grad is None else values.grad) / len(ranks)
        return gradient, combine(found)

    whole = total([[list(range(batch.num_sequences))]])
    for split in (total([parts]), total([parts[::2], parts[1::2]])):
        assert_same(split[0], whole[0])
        assert split[1] == pytest.approx(whole[1], abs=1e-12, rel=1e-9)


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-9 of the largest gradient."""
    assert_close(ours, expected, atol=1e-9 * float(expected.abs().max()) + 1e-300, rtol=0)


def test_extremes_are_of_the_trained_tokens_of_all_micro_batches():
    batch = batch_of([[0.0] * 2, [0.0], [0.0]], groups=[0, 0, 0], masks=[[1, 0], [1], [0]]).with_tensors(
        old_logprobs_T=torch.zeros(4), advantages_T=torch.ones(4)
    )
    algorithm = AlgorithmConfig(policy_loss_type="cispo", use_kl_loss=False)
    prepared, normalisers = prepare(batch, algorithm, world_size=1)
    logprobs = torch.tensor([0.5, 9.0, 3.0, -9.0], dtype=torch.float64).log().requires_grad_()
    found = []
    for sequence in range(3):
        index = batch.response_index([sequence])
        micro = prepared.select([sequence])
        found.append(micro_loss(micro, logprobs[index], None, algorithm, num_tokens=normalisers.num_tokens)[1])
    metrics = combine(found)
    name = "policy/loss_metrics/cispo/ratio"
    assert metrics[f"{name}_max"] == pytest.approx(3.0)
    assert metrics[f"{name}_min"] == pytest.approx(0.5)
    assert metrics[f"{name}_mean"] == pytest.approx(1.75)
    assert f"{name}_max" not in combine(found[2:])
