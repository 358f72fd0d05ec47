"""The critic's loss against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.critic import critic_loss, uses_critic
from skyrl.train.algorithms.estimators.gae import gae
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig
from skyrl.train.policy.minibatch import prepare_for_critic
from torch.testing import assert_close


def loss_of(values, *, old, returns, masks, **algorithm):
    """(loss, gradient, metrics) of one mini-batch."""
    batch = batch_of([[0.0] * len(m) for m in masks], groups=range(len(masks)), masks=masks)
    batch = batch.with_tensors(values_T=torch.tensor(old), returns_T=torch.tensor(returns))
    settings = AlgorithmConfig(**algorithm)
    prepared, known = prepare_for_critic(batch, settings, world_size=1)
    values_T = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss, metrics = critic_loss(prepared, values_T, settings, num_tokens=known.num_tokens)
    loss.backward()
    return float(loss.detach()), values_T.grad, {name: float(value) for name, value in metrics.items()}


def test_half_the_squared_error_in_the_mean_of_each_sequences_mean():
    loss, gradient, metrics = loss_of(
        [1.0, 3.0, 99.0, 2.0], old=[1.0, 3.0, 99.0, 2.0], returns=[2.0, 0.0, 0.0, 0.0], masks=[[1, 1, 0], [1]]
    )
    # errors 1 and 9 in the first sequence, 4 in the second: (5 + 4) / 2, halved
    assert loss == pytest.approx(2.25)
    assert_close(gradient, torch.tensor([-0.25, 0.75, 0.0, 1.0], dtype=torch.float64))
    assert metrics["critic/critic_loss"] == pytest.approx(2.25)
    assert metrics["critic/values_mean"] == pytest.approx(2.0)
    assert metrics["critic/values_clipfrac"] == 0


def test_a_value_that_moved_too_far_has_the_error_of_where_it_may_be():
    # R = 1: from 0 to 0.9 counts as 0.2, error 0.64 instead of 0.01; from 0 to -0.5 counts in full, 2.25 over 1.44
    loss, gradient, metrics = loss_of([0.9, -0.5], old=[0.0, 0.0], returns=[1.0, 1.0], masks=[[1, 1]], value_clip=0.2)
    assert loss == pytest.approx(0.5 * (0.64 + 2.25) / 2)
    assert_close(gradient, torch.tensor([0.0, 0.5 * -1.5], dtype=torch.float64))
    assert metrics["critic/values_clipfrac"] == pytest.approx(0.5)


def test_a_value_inside_its_bounds_is_never_counted_as_clipped():
    """Whatever its last bit: to near 0 from at most 0.1, so that the way there has fewer bits than its end."""
    generator = torch.Generator().manual_seed(0)
    old = (0.1 * torch.rand(200, generator=generator)).tolist()
    values = (1e-4 * torch.rand(200, dtype=torch.float64, generator=generator)).tolist()
    returns = [(-1.0) ** i for i in range(200)]
    _, _, metrics = loss_of(values, old=old, returns=returns, masks=[[1] * len(old)], value_clip=0.2)
    assert metrics["critic/values_clipfrac"] == 0


@pytest.mark.parametrize("value_clip", [None, 5.0])
def test_without_a_bound_that_is_met_every_error_counts_in_full(value_clip):
    loss, _, metrics = loss_of([0.9], old=[0.0], returns=[1.0], masks=[[1]], value_clip=value_clip)
    assert loss == pytest.approx(0.005) and metrics["critic/values_clipfrac"] == 0


def test_a_sequence_that_is_not_trained_on_counts_as_one_without_error():
    loss, gradient, _ = loss_of([3.0, 7.0], old=[3.0, 7.0], returns=[1.0, 0.0], masks=[[1], [0]])
    assert loss == pytest.approx(0.5 * 4 / 2) and gradient[1] == 0


def test_values_that_equal_the_returns_have_no_loss():
    batch = batch_of([[1.0, 0.0, 2.0], [3.0]], groups=[0, 0], masks=[[1, 0, 1], [1]])
    batch = batch.with_tensors(values_T=torch.tensor([1.0, 50.0, 2.0, 3.0]))
    # gamma 0: each return is the token's own reward; what the second token, an observation, got belongs to the first
    _, returns_T = gae(batch, AlgorithmConfig(gamma=0.0))
    assert_close(returns_T, torch.tensor([1.0, 0.0, 2.0, 3.0]))
    loss, _, _ = loss_of(returns_T.tolist(), old=[0.9, 0, 2.1, 3.0], returns=returns_T.tolist(), masks=[[1, 0, 1], [1]])
    assert loss == 0


def test_a_multi_turn_episode_is_one_episode_for_gae():
    # two turns of two tokens with an observation of two between them; the first turn's reward stands on its last token
    rewards, masks = [[0.0, 1.0, 0.0, 0.0, 0.0, 4.0]], [[1, 1, 0, 0, 1, 1]]
    batch = batch_of(rewards, groups=[0], masks=masks).with_tensors(values_T=torch.tensor([1.0, 2, 9, 9, 3, 2]))
    _, returns_T = gae(batch, AlgorithmConfig(gamma=0.5, lambd=0.5))
    # d = 0 + 1 - 1, 1 + 1.5 - 2, 0 + 1 - 3, 4 - 2; A from the end: 2, -2 + .5, .5 - .375, 0 + .03125
    advantages = torch.tensor([0.03125, 0.125, 0.0, 0.0, -1.5, 2.0])
    assert_close(returns_T, advantages + torch.tensor([1.0, 2, 0, 0, 3, 2]))


def test_a_minibatch_without_returns_is_refused():
    with pytest.raises(ValueError, match="no returns_T: estimate the advantages"):
        prepare_for_critic(batch_of([[1.0]], groups=[0]), AlgorithmConfig(), world_size=1)


@pytest.mark.parametrize(
    ("estimator", "path", "used"),
    [("gae", "a/b", True), ("gae", None, False), ("grpo", "a/b", False), ("a_users_own", "a/b", True)],
)
def test_a_critic_is_started_where_an_estimator_may_read_its_values(estimator, path, used):
    tree = {"critic": {"model": {"path": path}}, "algorithm": {"advantage_estimator": estimator}}
    assert uses_critic(SkyRLTrainConfig.model_validate({"trainer": tree}).trainer) is used
