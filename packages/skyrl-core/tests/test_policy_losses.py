"""Policy losses and their gradients against numbers worked out by hand, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.losses.covariance import draw_within_bounds, take_highest
from skyrl.train.algorithms.policy_losses import (
    POLICY_LOSSES,
    LossInputs,
    TokenLoss,
    policy_ratio,
    register_policy_loss,
)
from skyrl.train.config import AlgorithmConfig
from torch.testing import assert_close

OLD = -1.0


def inputs_of(
    ratios: Sequence[float],
    advantages: Sequence[float],
    mask: Sequence[float] | None = None,
    sequences: Sequence[int] | None = None,
) -> LossInputs:
    """Tokens with these ratios to an old logprob of -1, each a sequence of its own unless told otherwise."""
    old = torch.full((len(ratios),), OLD, dtype=torch.float64)
    logprobs = (old + torch.log(tensor(ratios))).requires_grad_()
    index = torch.arange(len(ratios))
    return LossInputs(
        logprobs_T=logprobs,
        old_logprobs_T=old,
        advantages_T=tensor(advantages),
        loss_mask_T=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
        segment_ids_T=index if sequences is None else torch.tensor(sequences),
        group_ids_T=index,
        positions_T=index * 0,
        rollout_logprobs_T=torch.full_like(old, math.nan),
    )


def against_the_rollout(inputs: LossInputs) -> LossInputs:
    """The same ratios, but to the rollout's logprobs; the old ones would give others."""
    return replace(inputs, rollout_logprobs_T=inputs.old_logprobs_T, old_logprobs_T=inputs.old_logprobs_T - 5)


def tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def outcome(name: str, inputs: LossInputs, **algorithm: object) -> tuple[TokenLoss, torch.Tensor]:
    """(the loss, its gradient with respect to the logprobs)."""
    out = POLICY_LOSSES.pick(name)(inputs, AlgorithmConfig.model_validate(algorithm))
    (gradient,) = torch.autograd.grad(out.loss_T.sum(), inputs.logprobs_T)
    return out, gradient


def test_regular_clips_where_clipping_makes_the_loss_larger():
    inputs = inputs_of([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
    out, gradient = outcome("regular", inputs, eps_clip_low=0.2, eps_clip_high=0.3)
    assert_close(out.loss_T.detach(), tensor([-2.0, -2.6, 3.0, -1.0, 1.6]))
    assert out.metrics_T["clip_ratio"].tolist() == [False, True, False, False, True]
    assert_close(gradient, tensor([-2.0, 0.0, 3.0, -1.0, 0.0]))


def test_dual_clip_bounds_the_loss_of_bad_samples_that_became_likely():
    out, gradient = outcome("dual_clip", inputs_of([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0]), clip_ratio_c=3.0)
    assert_close(out.loss_T.detach(), tensor([3.0, 2.0, -1.2]))
    assert_close(gradient, tensor([0.0, 2.0, 0.0]))


def test_gspo_takes_the_geometric_mean_of_a_sequences_trained_tokens_for_its_ratio():
    # sequence 0: ratios 4 and 1, and one that is not trained on: s = 2; sequence 1: ratios 1.1 and 1 / 1.1: s = 1
    inputs = inputs_of(
        [4.0, 1.0, 50.0, 1.1, 1 / 1.1], [1.0, -3.0, 1.0, 5.0, -5.0], mask=[1, 1, 0, 1, 1], sequences=[0, 0, 0, 1, 1]
    )
    inputs.old_logprobs_T[2] = math.nan
    out, gradient = outcome("gspo", inputs, eps_clip_low=0.2, eps_clip_high=0.3)
    trained = [0, 1, 3, 4]
    assert_close(out.loss_T.detach()[trained], tensor([-1.3, 6.0, -5.0, 5.0]))
    assert_close(gradient[trained], tensor([0.0, 6.0, -5.0, 5.0]))
    assert out.metrics_T["clip_ratio"][trained].tolist() == [True, False, False, False]
    assert gradient[2].isfinite()


def test_gspo_bounds_the_exponent_of_a_runaway_sequence():
    out, _ = outcome("gspo", inputs_of([math.exp(30.0)], [-1.0]))
    assert_close(out.loss_T.detach(), tensor([math.exp(10.0)]))


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    inputs = inputs_of([0.5, 1.0, 7.0], [1.0, -1.0, 2.0])
    out, gradient = outcome("cispo", inputs, cispo={"cispo_eps_clip_low": 0.25, "cispo_eps_clip_high": 4.0})
    logprobs = [OLD + math.log(0.5), OLD, OLD + math.log(7.0)]
    assert_close(out.loss_T.detach(), tensor([-0.75 * logprobs[0], logprobs[1], -10 * logprobs[2]]))
    assert_close(gradient, tensor([-0.75, 1.0, -10.0]))
    assert out.metrics_T["clip_ratio"].tolist() == [True, False, True]
    assert_close(out.metrics_T["cispo/ratio_mean"], tensor([0.5, 1.0, 7.0]))
    assert_close(out.metrics_T["cispo/ratio_clamped_mean"], tensor([0.75, 1.0, 5.0]))


def test_cispo_may_be_anchored_on_the_rollout():
    inputs = against_the_rollout(inputs_of([0.5, 7.0], [1.0, 2.0]))
    _, gradient = outcome("cispo", inputs, cispo={"cispo_anchor": "rollout"})
    assert_close(gradient, tensor([-0.5, -10.0]))
    _, gradient = outcome("cispo", inputs)
    assert_close(gradient, tensor([-5.0, -10.0]))


def test_sapo_gates_by_the_sign_of_the_advantage():
    out, gradient = outcome("sapo", inputs_of([1.0, 2.0, 2.0], [3.0, -1.0, 1.0]), sapo={"tau_pos": 1.0, "tau_neg": 2.0})

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    assert_close(out.loss_T.detach(), tensor([-3 * 2.0, sigmoid(2.0) * 2, -sigmoid(1.0) * 4]))
    slopes = [sigmoid(x) * (1 - sigmoid(x)) for x in (0.0, 2.0, 1.0)]
    # d/dlogp of -A 4/tau sigmoid(tau (r - 1)) is -4 A r sigmoid' : at r = 1 the gradient of -r A
    assert_close(gradient, tensor([-4 * 3 * slopes[0], 4 * 2 * slopes[1], -4 * 2 * slopes[2]]))
    assert_close(gradient[0], tensor([-3.0])[0])
    assert out.metrics_T["clip_ratio"].sum() == 0


def test_rollout_is_drops_tokens_outside_the_bounds():
    inputs = against_the_rollout(inputs_of([1.1, 1.5, 0.7, 0.9], [2.0, 2.0, 2.0, -1.0]))
    out, gradient = outcome("rollout_is", inputs, eps_clip_low=0.2, eps_clip_high=0.3)
    assert_close(out.loss_T.detach()[0], tensor([-2.2 * (OLD + math.log(1.1))])[0])
    assert_close(gradient, tensor([-2.2, 0.0, 0.0, 0.9]))
    assert out.metrics_T["clip_ratio"].tolist() == [False, True, True, False]


def probabilities(pi: Sequence[float], mu: Sequence[float], advantages: Sequence[float]) -> LossInputs:
    inputs = inputs_of([1.0] * len(pi), advantages)
    return replace(
        inputs, logprobs_T=tensor(pi).log().requires_grad_(), rollout_logprobs_T=tensor(mu).log(), old_logprobs_T=None
    )


def test_dppo_stops_tokens_that_would_move_on_away_from_the_rollouts_probability():
    # up by 0.3 and further up; up and back; down by 0.3 and further down; down and back; up by 0.1
    inputs = probabilities([0.5, 0.5, 0.5, 0.5, 0.3], [0.2, 0.2, 0.8, 0.8, 0.2], [1.0, -1.0, -1.0, 1.0, 1.0])
    out, gradient = outcome("dppo", inputs, dppo={"delta_low": 0.25, "delta_high": 0.2})
    assert out.metrics_T["clip_ratio"].tolist() == [True, False, True, False, False]
    assert_close(gradient, tensor([0.0, 2.5, 0.0, -0.625, -1.5]))
    _, gradient = outcome("dppo", inputs, dppo={"delta_low": 0.35, "delta_high": 0.35})
    assert (gradient != 0).all()


def test_dppo_may_measure_the_kl_of_sampled_or_not():
    kl = 0.2 * math.log(0.2 / 0.5) + 0.8 * math.log(0.8 / 0.5)
    for delta, dropped in ((kl - 1e-4, True), (kl + 1e-4, False)):
        inputs = probabilities([0.5], [0.2], [1.0])
        out, _ = outcome("dppo", inputs, dppo={"dppo_type": "binary_kl", "delta_high": delta})
        assert out.metrics_T["clip_ratio"].tolist() == [dropped]


def chosen(inputs: LossInputs, selected: Sequence[bool]) -> LossInputs:
    return replace(inputs, selected_T=torch.tensor(selected))


def test_clip_cov_gives_the_chosen_tokens_no_gradient():
    inputs = chosen(inputs_of([1.0, 1.5, 1.1], [2.0, 2.0, -2.0]), [True, False, False])
    out, gradient = outcome("clip_cov", inputs)
    assert_close(out.loss_T.detach(), tensor([0.0, -2.4, 2.2]))
    assert_close(gradient, tensor([0.0, 0.0, 2.2]))
    assert out.metrics_T["clip_ratio"].tolist() == [True, False, False]


def test_kl_cov_penalises_the_chosen_tokens_and_clips_nothing():
    inputs = chosen(inputs_of([2.0, 2.0, 0.5], [1.0, 1.0, 1.0]), [True, False, True])
    out, gradient = outcome("kl_cov", inputs, kl_cov={"ppo_kl_coef": 0.1})
    log2 = math.log(2)
    assert_close(out.loss_T.detach(), tensor([-2 + 0.1 * log2, -2.0, -0.5 + 0.1 * log2]))
    assert_close(gradient, tensor([-1.9, -2.0, -0.6]))


# One sequence of four trained tokens and one that is not: A - mean = (-3, -1, 1, 3), logp - mean = (-3, -1, 1, 3) / 2,
# so the covariances are 4.5, 0.5, 0.5 and 4.5; the old logprobs are the present ones.
LOGPROBS = tensor([-4.0, -3.0, -2.0, -1.0, -9.0])
COVARIANT = batch_of([[0.0] * 5], groups=[0], masks=[[1, 1, 1, 1, 0]]).with_tensors(
    advantages_T=tensor([1.0, 3.0, 5.0, 7.0, 99.0]), old_logprobs_T=LOGPROBS
)


def select(function, batch=COVARIANT, logprobs=LOGPROBS, **algorithm):
    return function(batch, logprobs, AlgorithmConfig.model_validate(algorithm)).nonzero().squeeze(1).tolist()


def test_clip_cov_draws_among_tokens_whose_covariance_lies_within_the_bounds():
    assert set(select(draw_within_bounds, clip_cov={"clip_ratio": 1.0})) == {0, 3}
    assert set(select(draw_within_bounds, clip_cov={"clip_ratio": 1.0, "clip_cov_lb": 0.1})) == {0, 1, 2, 3}
    assert select(draw_within_bounds, clip_cov={"clip_ratio": 1.0, "clip_cov_ub": 4.0}) == []
    (one,) = select(draw_within_bounds, clip_cov={"clip_ratio": 2e-4})
    assert one in (0, 3)


def test_clip_cov_leaves_out_tokens_that_ppos_own_clip_holds_back():
    moved = COVARIANT.with_tensors(old_logprobs_T=LOGPROBS - tensor([0, 0, 0, 1.0, 0]))
    assert select(draw_within_bounds, moved, clip_cov={"clip_ratio": 1.0}) == [0]


def test_the_draw_of_clip_cov_follows_from_the_tokens_of_the_minibatch():
    def draw(first_token):
        size = 200
        batch = batch_of([[0.0] * size], groups=[0]).with_tensors(
            advantages_T=torch.linspace(0, 1, size), old_logprobs_T=torch.linspace(-3, -1, size)
        )
        batch.token_ids_N[0] = first_token
        return select(draw_within_bounds, batch, batch.old_logprobs_T, clip_cov={"clip_ratio": 0.1, "clip_cov_lb": 0.0})

    assert len(draw(1)) == 20
    assert draw(1) == draw(1) != draw(2)


def test_kl_cov_takes_the_tokens_of_highest_covariance():
    assert select(take_highest, kl_cov={"kl_cov_frac": 0.5}) == [0, 3]
    assert select(take_highest, kl_cov={"kl_cov_frac": 0.0}) == [0]
    assert select(take_highest, kl_cov={"kl_cov_frac": 1.0}) == [0, 1, 2, 3]


def test_nothing_is_chosen_where_nothing_is_trained_on():
    empty = COVARIANT.with_tensors(loss_mask_T=torch.zeros(5))
    assert select(draw_within_bounds, empty) == select(take_highest, empty) == []


def test_cross_entropy_ignores_advantages():
    out, gradient = outcome("cross_entropy", inputs_of([1.0, 2.0], [5.0, -5.0]))
    assert_close(out.loss_T.detach(), tensor([1.0, 1.0 - math.log(2)]))
    assert_close(gradient, tensor([-1.0, -1.0]))


def test_importance_sampling_has_no_bounds():
    out, gradient = outcome("importance_sampling", inputs_of([1.0, 9.0, 0.1], [2.0, 2.0, -2.0]))
    assert_close(out.loss_T.detach(), tensor([-2.0, -18.0, 0.2]))
    assert_close(gradient, out.loss_T.detach())
    assert_close(out.metrics_T["importance_ratio"], tensor([1.0, 9.0, 0.1]))


def test_the_ratio_of_a_token_that_is_not_trained_on_is_1_even_if_its_old_logprob_is_nan():
    inputs = inputs_of([2.0, 3.0], [1.0, 1.0], mask=[1.0, 0.0])
    inputs.old_logprobs_T[1] = math.nan
    assert_close(policy_ratio(inputs), tensor([2.0, 1.0]))


@pytest.mark.parametrize("name", ["cispo", "rollout_is", "dppo"])
def test_a_loss_on_the_rollouts_logprobs_is_finite_where_an_observation_has_none(name):
    inputs = against_the_rollout(inputs_of([1.1, 1.0], [1.0, 0.0], mask=[1.0, 0.0]))
    inputs.rollout_logprobs_T[1] = math.nan
    out, gradient = outcome(name, inputs, cispo={"cispo_anchor": "rollout"})
    assert out.loss_T.isfinite().all() and gradient.isfinite().all()


def test_the_ratio_does_not_overflow():
    inputs = inputs_of([1.0], [1.0])
    inputs.old_logprobs_T[0] = -1000.0
    assert_close(policy_ratio(inputs), tensor([math.exp(20.0)]))


def test_an_unknown_loss_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="policy_loss_type=dualclip: known: .*did you mean dual_clip"):
        POLICY_LOSSES.pick("dualclip")


def test_a_users_loss_is_found_by_its_name():
    def reinforce(inputs, algorithm):
        return TokenLoss(-inputs.advantages_T * inputs.logprobs_T)

    register_policy_loss("reinforce_of_a_test", reinforce)
    assert POLICY_LOSSES.pick("reinforce_of_a_test") is reinforce
    assert "reinforce_of_a_test" not in POLICY_LOSSES.builtin
