"""A user's functions of the public form give what flat functions with the same formula give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.advantages import estimate, register_advantage_estimator
from skyrl.train.algorithms.objective import micro_loss
from skyrl.train.algorithms.padded import Rectangle
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES, register_policy_loss
from skyrl.train.config import AlgorithmConfig
from skyrl.train.policy.minibatch import prepare
from skyrl.train.policy.shares import combine
from torch.testing import assert_close

MASKS = [[1.0, 0.0, 1.0], [1.0], [1.0, 1.0]]


def scored():
    batch = batch_of([[0.0, 0.0, 1.0], [0.5], [0.0, 2.0]], groups=[4, 4, 9], masks=MASKS)
    spread = torch.tensor([-2.0, float("nan"), -1.5, -2.2, -1.0, -3.0])
    return batch.with_tensors(
        old_logprobs_T=spread, advantages_T=torch.tensor([1.0, 5.0, -1.0, 2.0, 0.5, -2.0]), rollout_logprobs_T=spread
    )


def test_a_rectangle_has_each_response_at_its_right_end():
    pad = Rectangle.of(torch.tensor([0, 0, 0, 1, 2, 2]))
    rows = pad.rows(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert rows.tolist() == [[1, 2, 3], [0, 0, 4], [0, 5, 6]]
    assert pad.flat(rows).tolist() == [1, 2, 3, 4, 5, 6]


def test_an_estimator_of_the_public_form_sees_rewards_groups_and_settings():
    @register_advantage_estimator("batch_baseline")
    def batch_baseline(token_level_rewards, response_mask, index, **others):
        assert isinstance(index, np.ndarray) and index.tolist() == ["4", "4", "9"]
        assert others["gamma"] == 0.5 and others["values"] is None and others["config"].lambd == 1.0
        scores = token_level_rewards.sum(-1, keepdim=True)
        return (scores - scores.mean()) * response_mask, scores * response_mask

    out = estimate(scored(), AlgorithmConfig(advantage_estimator="batch_baseline", gamma=0.5))
    mean = 3.5 / 3
    expected = torch.tensor([1 - mean] * 3 + [0.5 - mean] + [2 - mean] * 2)
    assert_close(out.advantages_T, expected)
    assert_close(out.returns_T, torch.tensor([1.0, 1, 1, 0.5, 2, 2]))
    assert callable(batch_baseline), "a decorated function stays what it is"


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_a_loss_of_the_public_form_has_the_gradient_of_the_flat_one_for_any_micro_batches(reduction):
    @register_policy_loss("public_regular")
    def public_regular(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        assert not old_log_probs.isnan().any() and not rollout_logprobs.isnan().any()
        ratio = (log_probs - old_log_probs).exp()
        low, high = 1 - config.eps_clip_low, 1 + config.eps_clip_high
        loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        return (loss * loss_mask).sum(), {"own": 0.25}

    def gradient(loss: str, cuts: list[list[int]]):
        algorithm = AlgorithmConfig(policy_loss_type=loss, loss_reduction=reduction, use_kl_loss=False)
        prepared, known = prepare(scored(), algorithm, world_size=1)
        logprobs = torch.linspace(-2.5, -1.0, 6, dtype=torch.float64).requires_grad_()
        found = []
        for cut in cuts:
            index = prepared.response_index(cut)
            part, shares = micro_loss(
                prepared.select(cut), logprobs[index], None, algorithm, num_tokens=known.num_tokens
            )
            part.backward()
            found.append(shares)
        return logprobs.grad, combine(found)

    expected, _ = gradient("regular", [[0, 1, 2]])
    for cuts in ([[0, 1, 2]], [[2], [0, 1]]):
        ours, metrics = gradient("public_regular", cuts)
        assert_close(ours, expected)
        assert metrics["policy/loss_metrics/own"] == pytest.approx(0.25)
    assert expected.abs().max() > 0.1


def test_an_older_loss_without_rollout_logprobs_and_with_one_number_is_taken_too():
    POLICY_LOSSES.register("older", lambda log_probs, old_log_probs, advantages, config: (-log_probs.sum(), 0.5))
    algorithm = AlgorithmConfig(policy_loss_type="older", use_kl_loss=False)
    prepared, known = prepare(scored(), algorithm, world_size=1)
    logprobs = torch.zeros(6, requires_grad=True)
    loss, shares = micro_loss(prepared, logprobs, None, algorithm, num_tokens=known.num_tokens)
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0] * 6
    assert float(shares["policy/loss_metrics/clip_ratio"]) == pytest.approx(0.5)


def test_a_decorated_flat_function_is_taken_as_it_is():
    @register_advantage_estimator("flat")
    def flat(batch, algorithm):
        return 3 * batch.rewards_T, batch.rewards_T

    out = estimate(scored(), AlgorithmConfig(advantage_estimator="flat"))
    assert_close(out.advantages_T, 3 * out.rewards_T)
    with pytest.raises(ValueError, match="already taken"):
        register_advantage_estimator("grpo")(flat)
