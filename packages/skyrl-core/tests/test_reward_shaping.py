"""Overlong punishment and the zero-variance filter against cases worked out by hand."""

from __future__ import annotations

import torch
from batches import batch_of
from skyrl.train.algorithms.reward_shaping import mask_zero_variance, punish_overlong, shape
from skyrl.train.config import AlgorithmConfig
from torch.testing import assert_close


def masked(rewards, groups, masks=None, tolerance=1e-6):
    batch, metrics = mask_zero_variance(batch_of(rewards, groups=groups, masks=masks), tolerance=tolerance)
    return batch.loss_mask_T.tolist(), metrics["reward/num_zero_variance_filtered"]


def test_groups_whose_samples_got_the_same_reward_are_masked():
    rewards = [[1.0], [1.0], [0.0], [1.0], [5.0]]
    assert masked(rewards, groups=[0, 0, 1, 1, 2]) == ([0, 0, 1, 1, 1], 1)


def test_rewards_on_single_tokens_count_by_their_sum():
    assert masked([[0.5, 0.5], [1.0], [0.5, 0.0], [1.0]], groups=[0, 0, 1, 1]) == ([0, 0, 0, 1, 1, 1], 1)


def test_a_sample_that_is_masked_already_tells_no_difference():
    # of group 0 only equal samples are alive; of group 1 only one sample is
    rewards, masks = [[1.0], [1.0], [0.0], [1.0], [0.0]], [[1], [1], [0], [1], [0]]
    assert masked(rewards, groups=[0, 0, 0, 1, 1], masks=masks) == ([0, 0, 0, 1, 0], 1)


def test_the_tolerance_decides_what_is_the_same():
    rewards = [[0.5], [0.5001], [0.0], [0.01]]
    assert masked(rewards, groups=[0, 0, 1, 1], tolerance=1e-3) == ([0, 0, 1, 1], 1)
    assert masked(rewards, groups=[0, 0, 1, 1], tolerance=0.1) == ([0, 0, 0, 0], 2)
    assert masked(rewards, groups=[0, 0, 1, 1], tolerance=0.0) == ([1, 1, 1, 1], 0)


def overlong(rewards, masks=None, **keys):
    batch = batch_of(rewards, groups=[0] * len(rewards), masks=masks)
    shaped, metrics = punish_overlong(batch, AlgorithmConfig(overlong_buffer_len=4, **keys), max_response_len=6)
    return shaped.rewards_T, metrics["reward/avg_overlong_penalty"]


def test_the_last_tokens_before_the_limit_cost_reward_in_proportion():
    # the buffer begins after two tokens: responses of 2, 3, 6 and 7 tokens
    rewards = [[0.0, 1.0], [0.0, 0.0, 1.0], [0.0] * 5 + [1.0], [0.0] * 6 + [1.0]]
    got, penalty = overlong(rewards, overlong_buffer_penalty_factor=2.0)
    expected = [[0.0, 1.0], [0.0, 0.0, 0.5], [0.0] * 5 + [-1.0], [0.0] * 7]
    assert_close(got, torch.tensor([r for sequence in expected for r in sequence]))
    assert penalty == (0.0 + 0.5 + 2.0 + 1.0) / 4


def test_the_penalty_lies_on_the_last_trained_token():
    got, _ = overlong([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], masks=[[1, 1, 0, 0], [0, 0, 0, 0]])
    assert_close(got, torch.tensor([1.0, -0.5, 0.0, 0.0, 1.0, 0.0, 0.0, -0.5]))


def test_a_batch_is_shaped_only_where_it_is_asked_for():
    batch = batch_of([[1.0] * 6, [6.0]], groups=[0, 0])
    same, metrics = shape(batch, AlgorithmConfig(), max_response_len=6)
    assert same is batch and metrics == {}


def test_the_filter_sees_rewards_after_the_punishment():
    # equal before, 6 - 1 and 6 after
    batch = batch_of([[1.0] * 6, [6.0]], groups=[0, 0])
    algorithm = AlgorithmConfig(zero_variance_filter=True, overlong_buffer_len=4)
    shaped, metrics = shape(batch, algorithm, max_response_len=6)
    assert shaped.loss_mask_T.sum() == 7
    assert metrics == {"reward/avg_overlong_penalty": 0.5, "reward/num_zero_variance_filtered": 0.0}
    assert shape(batch, AlgorithmConfig(zero_variance_filter=True), max_response_len=6)[0].loss_mask_T.sum() == 0
