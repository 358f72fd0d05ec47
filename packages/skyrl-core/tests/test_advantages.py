"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimate,
    normalise,
    register_advantage_estimator,
)
from skyrl.train.config import AlgorithmConfig
from torch.testing import assert_close


def test_grpo_divides_by_the_sample_deviation_of_the_group():
    # group 7: sums 1, 0, 2 -> mean 1, deviation 1; group 3: sums 0.5, 0.5 -> no spread
    batch = batch_of([[0, 1.0], [0.0], [1.0, 1.0], [0.5], [0.25, 0.25]], groups=[7, 7, 7, 3, 3])
    out = estimate(batch, AlgorithmConfig())
    assert_close(out.advantages_T, torch.tensor([0.0, 0.0, -1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), atol=2e-6, rtol=0)
    assert_close(out.returns_T, out.advantages_T)
    assert out.advantages_T.dtype == torch.float32


def test_grpo_without_the_deviation_only_subtracts_the_mean():
    batch = batch_of([[3.0], [0.0], [0.0]], groups=[0, 0, 0])
    out = estimate(batch, AlgorithmConfig(grpo_norm_by_std=False))
    assert_close(out.advantages_T, torch.tensor([2.0, -1.0, -1.0]))


def test_a_group_of_one_keeps_its_score():
    out = estimate(batch_of([[0.5, 0.25]], groups=[4]), AlgorithmConfig())
    assert_close(out.advantages_T, torch.tensor([0.75, 0.75]))


def test_tokens_that_the_policy_did_not_sample_get_no_advantage():
    batch = batch_of([[0.0, 0.0, 1.0], [0.0]], groups=[0, 0], masks=[[1, 0, 1], [1]])
    out = estimate(batch, AlgorithmConfig())
    root = 0.5**0.5
    assert_close(out.advantages_T, torch.tensor([root, 0.0, root, -root]), atol=2e-6, rtol=0)


def test_samples_of_a_group_need_not_lie_together():
    together = estimate(batch_of([[1.0], [0.0], [5.0], [3.0]], groups=[0, 0, 1, 1]), AlgorithmConfig())
    apart = estimate(batch_of([[1.0], [5.0], [0.0], [3.0]], groups=[0, 1, 0, 1]), AlgorithmConfig())
    assert_close(apart.advantages_T, together.advantages_T[[0, 2, 1, 3]])


def test_normalised_advantages_have_mean_0_and_variance_1_over_trained_tokens_only():
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    out = normalise(torch.tensor([1.0, 3.0, 100.0, 5.0, 7.0]), mask)
    # mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    assert_close(out, torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0]) / 5**0.5)


def test_an_unknown_estimator_is_refused_with_the_known_and_the_nearest_one():
    with pytest.raises(ValueError, match="advantage_estimator=grpoo: known: .*grpo.*did you mean grpo"):
        estimate(batch_of([[1.0]], groups=[0]), AlgorithmConfig(advantage_estimator="grpoo"))


def test_a_registered_estimator_is_used_and_its_name_cannot_be_taken_twice():
    def twice_the_reward(batch, algorithm):
        return 2 * batch.rewards_T, batch.rewards_T

    register_advantage_estimator("twice_the_reward", twice_the_reward)
    out = estimate(batch_of([[1.0, 2.0]], groups=[0]), AlgorithmConfig(advantage_estimator="twice_the_reward"))
    assert_close(out.advantages_T, torch.tensor([2.0, 4.0]))
    with pytest.raises(ValueError, match="already taken"):
        register_advantage_estimator("grpo", twice_the_reward)
    assert "twice_the_reward" in ADVANTAGE_ESTIMATORS
