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
from skyrl.train.algorithms.reductions import loss_weights
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


def test_dr_grpo_is_the_centred_score_over_a_constant_length():
    # its options: no division by the deviation, and every token counts 1 / (sequences x max_seq_len)
    algorithm = AlgorithmConfig(grpo_norm_by_std=False, loss_reduction="seq_mean_token_sum_norm", max_seq_len=10)
    batch = estimate(batch_of([[3.0], [0.0, 0.0], [0.0]], groups=[0, 0, 0]), algorithm)
    per_token = batch.advantages_T.double() * loss_weights(batch, algorithm)
    assert_close(per_token, torch.tensor([2.0, -1.0, -1.0, -1.0], dtype=torch.float64) / 30)


def test_rloo_compares_with_the_mean_of_the_other_samples():
    # group 7: 3 against (1 + 2) / 2, 1 against 2.5, 2 against 2; group 3 has one sample, and no other
    batch = batch_of([[1.0, 2.0], [1.0], [2.0], [5.0]], groups=[7, 7, 7, 3])
    out = estimate(batch, AlgorithmConfig(advantage_estimator="rloo"))
    assert_close(out.advantages_T, torch.tensor([1.5, 1.5, -1.5, 0.0, 0.0]))
    assert_close(out.returns_T, out.advantages_T)


def test_maxrl_divides_by_the_mean_of_the_group():
    # group 0: mean 1/4; group 1: nobody was right; group 2: one sample
    batch = batch_of([[1.0], [0.0], [0.0], [0.0], [0.0], [0.0], [0.7]], groups=[0, 0, 0, 0, 1, 1, 2])
    out = estimate(batch, AlgorithmConfig(advantage_estimator="maxrl"))
    expected = torch.tensor([3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.7])
    assert_close(out.advantages_T, expected, atol=2e-5, rtol=0)


def test_reinforce_plus_plus_whitens_discounted_rewards_to_go():
    batch = batch_of([[0.0, 0.0, 4.0], [2.0]], groups=[0, 1])
    out = estimate(batch, AlgorithmConfig(advantage_estimator="reinforce++", gamma=0.5))
    # to go: 1, 2, 4 and 2; mean 9/4, variance ((5/4)^2 + 2 (1/4)^2 + (7/4)^2) / 3
    assert_close(out.returns_T, torch.tensor([1.0, 2.0, 4.0, 2.0]))
    deviation = ((1.25**2 + 2 * 0.25**2 + 1.75**2) / 3) ** 0.5
    assert_close(out.advantages_T, torch.tensor([-1.25, -0.25, 1.75, -0.25]) / deviation)


def test_observations_take_no_time_and_no_part_in_the_whitening():
    # the reward of the second turn is two sampled tokens away from the first, not four
    batch = batch_of([[1.0, 0.0, 0.0, 0.0, 8.0]], groups=[0], masks=[[1, 0, 0, 1, 1]])
    out = estimate(batch, AlgorithmConfig(advantage_estimator="reinforce++", gamma=0.5))
    assert_close(out.returns_T, torch.tensor([3.0, 0.0, 0.0, 4.0, 8.0]))
    deviation = ((2.0**2 + 1.0**2 + 3.0**2) / 2) ** 0.5
    assert_close(out.advantages_T, torch.tensor([-2.0, 0.0, 0.0, -1.0, 3.0]) / deviation)


def test_a_reward_on_a_token_that_was_not_sampled_counts_for_the_token_before_it():
    batch = batch_of([[1.0, 5.0, 2.0]], groups=[0], masks=[[1, 0, 1]])
    out = estimate(batch, AlgorithmConfig(advantage_estimator="reinforce++", gamma=0.5))
    assert_close(out.returns_T, torch.tensor([7.0, 0.0, 2.0]))


def test_gae_follows_the_values_of_the_critic():
    batch = batch_of([[0.0, 1.0, 2.0], [1.0]], groups=[0, 1]).with_tensors(values_T=torch.tensor([0.5, 1.0, 2.0, 3.0]))
    out = estimate(batch, AlgorithmConfig(advantage_estimator="gae", gamma=0.5, lambd=0.5))
    # d = 0 + .5 - .5, 1 + 1 - 1, 2 + 0 - 2 and 1 - 3; A = .25 x 1, 1, 0 and -2
    raw = torch.tensor([0.25, 1.0, 0.0, -2.0])
    assert_close(out.returns_T, raw + torch.tensor([0.5, 1.0, 2.0, 3.0]))
    mean = raw.mean()
    assert_close(out.advantages_T, (raw - mean) / ((raw - mean).square().sum() / 3).sqrt())


def test_gae_reads_no_value_at_an_observation():
    values = torch.tensor([1.0, 77.0, 2.0])
    batch = batch_of([[1.0, 0.0, 3.0]], groups=[0], masks=[[1, 0, 1]]).with_tensors(values_T=values)
    out = estimate(batch, AlgorithmConfig(advantage_estimator="gae", gamma=0.5, lambd=1.0))
    # d = 1 + .5 x 2 - 1 and 3 - 2; A = 1 + .5 x 1 and 1
    assert_close(out.returns_T, torch.tensor([2.5, 0.0, 3.0]))


def test_gae_without_a_critic_says_so():
    with pytest.raises(ValueError, match="no values_T: .*advantage_estimator=gae needs a critic"):
        estimate(batch_of([[1.0]], groups=[0]), AlgorithmConfig(advantage_estimator="gae"))


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce++", "gae"])
def test_a_batch_with_little_to_train_on_gives_finite_advantages(name):
    for masks in ([[1], [0, 0]], [[0], [0, 0]]):
        batch = batch_of([[1.0], [0.0, 2.0]], groups=[0, 0], masks=masks).with_tensors(values_T=torch.ones(3))
        out = estimate(batch, AlgorithmConfig(advantage_estimator=name))
        assert out.advantages_T.isfinite().all() and out.returns_T.isfinite().all()
        assert (out.advantages_T[batch.loss_mask_T == 0] == 0).all()


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
