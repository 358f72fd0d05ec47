"""Policy losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from skyrl.train.algorithms.policy_losses import (
    POLICY_LOSSES,
    LossInputs,
    TokenLoss,
    policy_ratio,
    register_policy_loss,
)
from skyrl.train.config import AlgorithmConfig
from torch.testing import assert_close


def inputs_of(ratios, advantages, mask=None):
    old = torch.full((len(ratios),), -1.0)
    logprobs = (old + torch.log(torch.tensor(ratios))).requires_grad_()
    index = torch.arange(len(ratios))
    return LossInputs(
        logprobs_T=logprobs,
        old_logprobs_T=old,
        advantages_T=torch.tensor(advantages),
        loss_mask_T=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
        segment_ids_T=index,
        group_ids_T=index,
        positions_T=index * 0,
        rollout_logprobs_T=old,
    )


def test_regular_clips_where_clipping_makes_the_loss_larger():
    inputs = inputs_of([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
    out = POLICY_LOSSES.pick("regular")(inputs, AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.3))
    assert_close(out.loss_T, torch.tensor([-2.0, -2.6, 3.0, -1.0, 1.6]))
    assert out.metrics_T["clip_ratio"].tolist() == [False, True, False, False, True]
    out.loss_T.sum().backward()
    assert_close(inputs.logprobs_T.grad, torch.tensor([-2.0, 0.0, 3.0, -1.0, 0.0]))


def test_dual_clip_bounds_the_loss_of_bad_samples_that_became_likely():
    inputs = inputs_of([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    out = POLICY_LOSSES.pick("dual_clip")(inputs, AlgorithmConfig(clip_ratio_c=3.0))
    assert_close(out.loss_T, torch.tensor([3.0, 2.0, -1.2]))
    out.loss_T.sum().backward()
    assert_close(inputs.logprobs_T.grad, torch.tensor([0.0, 2.0, 0.0]))


def test_the_ratio_of_a_token_that_is_not_trained_on_is_1_even_if_its_old_logprob_is_nan():
    inputs = inputs_of([2.0, 3.0], [1.0, 1.0], mask=[1.0, 0.0])
    inputs.old_logprobs_T[1] = math.nan
    assert_close(policy_ratio(inputs), torch.tensor([2.0, 1.0]))


def test_the_ratio_does_not_overflow():
    inputs = inputs_of([1.0], [1.0])
    inputs.old_logprobs_T[0] = -1000.0
    assert_close(policy_ratio(inputs), torch.tensor([math.exp(20.0)]))


def test_an_unknown_loss_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="policy_loss_type=dualclip: known: .*did you mean dual_clip"):
        POLICY_LOSSES.pick("dualclip")


def test_a_users_loss_is_found_by_its_name():
    def reinforce(inputs, algorithm):
        return TokenLoss(-inputs.advantages_T * inputs.logprobs_T)

    register_policy_loss("reinforce_of_a_test", reinforce)
    assert POLICY_LOSSES.pick("reinforce_of_a_test") is reinforce
