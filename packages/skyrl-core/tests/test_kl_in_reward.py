"""The KL penalty on the reward, its metrics and its coefficient against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.advantages import estimate
from skyrl.train.algorithms.kl_in_reward import KL_CONTROLS, next_coefficient, penalise
from skyrl.train.config import AlgorithmConfig
from torch.testing import assert_close

# KL (k1) 1, -, -2 in the first sequence, 0.5 in the second; the observation has no reference logprob
BATCH = batch_of([[0.0, 0.0, 1.0], [2.0]], groups=[0, 0], masks=[[1, 0, 1], [1]]).with_tensors(
    old_logprobs_T=torch.tensor([-1.0, -1.0, -3.0, -1.0]), ref_logprobs_T=torch.tensor([-2.0, math.nan, -1.0, -1.5])
)


def algorithm(**keys: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"use_kl_loss": False, "use_kl_in_reward": True} | keys)


def test_each_trained_token_pays_for_its_own_kl():
    batch, metrics = penalise(BATCH, algorithm(kl_estimator_type="k1"), 0.1)
    assert_close(batch.rewards_T, torch.tensor([-0.1, 0.0, 1.2, 1.95]))
    # means of the sequences: -1/2 and 1/2; largest |KL|: 2 and 1/2
    assert metrics == pytest.approx({"loss/avg_kl": 0.0, "loss/avg_kl_max": 1.25, "loss/kl_loss_coef": 0.1})


def test_the_estimator_is_the_configured_one():
    batch, metrics = penalise(BATCH, algorithm(kl_estimator_type="k2"), 1.0)
    assert_close(batch.rewards_T, torch.tensor([-0.5, 0.0, -1.0, 1.875]))
    assert metrics["loss/avg_kl"] == pytest.approx((1.25 + 0.125) / 2)


def test_a_coefficient_below_zero_rewards_no_distance_from_the_reference():
    cfg = algorithm(kl_estimator_type="k2", kl_ctrl={"type": "adaptive", "kl_target": 1.0, "horizon": 100})
    below = next_coefficient(0.2, 0.0, 1000, cfg)
    assert below < 0
    assert_close(penalise(BATCH, cfg, below)[0].rewards_T, BATCH.rewards_T)


def test_advantages_see_the_penalised_rewards():
    batch, _ = penalise(BATCH, algorithm(kl_estimator_type="k2"), 1.0)
    advantages = estimate(batch, algorithm(advantage_estimator="rloo")).advantages_T
    assert_close(advantages, torch.tensor([-3.375, 0.0, -3.375, 3.375]))


def test_a_penalty_without_a_reference_says_what_is_missing():
    with pytest.raises(ValueError, match="no ref_logprobs_T: a KL term needs the reference"):
        penalise(BATCH.with_tensors(ref_logprobs_T=None), algorithm(), 0.1)


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        (0.1, 50, 0.2),  # on target
        (0.11, 50, 0.2 * (1 + 0.1 * 50 / 1000)),
        (0.09, 50, 0.2 * (1 - 0.1 * 50 / 1000)),
        (9.0, 50, 0.2 * (1 + 0.2 * 50 / 1000)),  # the error counts 20 % at most
        (0.0, 500, 0.2 * (1 - 0.2 * 500 / 1000)),
    ],
)
def test_an_adaptive_coefficient_follows_the_kl(kl, samples, expected):
    cfg = algorithm(kl_ctrl={"type": "adaptive", "kl_target": 0.1, "horizon": 1000})
    assert next_coefficient(0.2, kl, samples, cfg) == pytest.approx(expected, rel=1e-12)


def test_a_fixed_coefficient_stays():
    assert next_coefficient(0.2, 9.0, 500, algorithm()) == 0.2


def test_an_unknown_control_is_refused():
    with pytest.raises(ValueError, match=r"kl_ctrl\.type=adaptve: known: adaptive, fixed; did you mean adaptive"):
        KL_CONTROLS.pick("adaptve")
