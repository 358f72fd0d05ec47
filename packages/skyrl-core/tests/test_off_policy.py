"""Off-policy correction against numbers worked out by hand: ratios of 2, 4, 1/2, ... between old policy and rollout."""

from __future__ import annotations

import math

import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.anchors import corrects_off_policy, needs_old_logprobs
from skyrl.train.algorithms.off_policy import correction
from skyrl.train.config import AlgorithmConfig
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.minibatch import prepare
from torch.testing import assert_close

NAN = math.nan
# Three sequences; an observation of the first has a ratio of 100 that must not count, and no rollout logprob
RATIOS = [[2.0, 100.0, 4.0], [0.5], [1.0, 1.0]]
MASKS = [[1, 0, 1], [1], [1, 1]]


def batch() -> TrajectoryBatch:
    ratios = torch.tensor([r for sequence in RATIOS for r in sequence])
    made = batch_of([[0.0] * len(r) for r in RATIOS], groups=[0, 0, 0], masks=MASKS)
    rollout = torch.where(made.loss_mask_T > 0, torch.full_like(ratios, -3.0), NAN)
    size = torch.zeros_like(ratios)
    return made.with_tensors(
        rollout_logprobs_T=rollout, old_logprobs_T=ratios.log() - 3.0, advantages_T=size + 1, ref_logprobs_T=size
    )


def corrected(**settings: object) -> tuple[list[float], dict[str, float]]:
    algorithm = AlgorithmConfig.model_validate({"off_policy_correction": settings})
    assert corrects_off_policy(algorithm)
    weights, metrics = correction(batch(), algorithm)
    assert weights.dtype == torch.float64
    return [round(w, 6) for w in weights.tolist()], metrics


def test_the_ratio_of_tokens_is_truncated_token_by_token() -> None:
    weights, metrics = corrected(tis_ratio_type="token", token_tis_ratio_clip_high=3.0)
    assert weights == [2.0, 0.0, 3.0, 0.5, 1.0, 1.0]
    assert metrics["tis_token_clip_high_ratio"] == pytest.approx(1 / 5)


def test_the_ratio_of_a_sequence_is_the_truncated_product() -> None:
    weights, metrics = corrected(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=5.0)
    assert weights == [5.0, 0.0, 5.0, 0.5, 1.0, 1.0]
    assert metrics["tis_seq_clip_high_ratio"] == pytest.approx(1 / 3)
    assert corrected(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=9.0)[0][0] == 8.0


def test_the_statistics_are_of_trained_tokens_only() -> None:
    _, metrics = corrected(tis_ratio_type="token")
    ratios = torch.tensor([2.0, 4.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    assert metrics["is_ratio_mean"] == pytest.approx(1.7)
    assert metrics["is_ratio_std"] == pytest.approx(float(ratios.std(unbiased=False)))
    assert (metrics["is_ratio_max"], metrics["is_ratio_min"]) == pytest.approx((4.0, 0.5))


@pytest.mark.parametrize(
    ("low", "high", "weights"),
    [(0.6, 7.0, [0, 0, 0, 0, 1, 1]), (0.4, 7.0, [0, 0, 0, 1, 1, 1]), (0.6, 9.0, [1, 0, 1, 0, 1, 1])],
)
def test_sequences_are_kept_by_the_product_of_their_ratios(low: float, high: float, weights: list[float]) -> None:
    got, metrics = corrected(sequence_mask_metric="product", product_mask_low=low, product_mask_high=high)
    assert got == weights
    under, over = float(low > 0.5) / 3, float(high < 8.0) / 3
    assert metrics["product_sequence_mask_under_low_ratio"] == pytest.approx(under)
    assert metrics["product_sequence_mask_over_high_ratio"] == pytest.approx(over)
    assert metrics["product_sequence_mask_masked_ratio"] == pytest.approx(under + over)


def test_sequences_are_kept_by_the_geometric_mean_of_their_ratios() -> None:
    mean = math.sqrt(8.0)  # of two tokens
    assert corrected(sequence_mask_metric="geometric", geo_mask_low=0.4, geo_mask_high=mean + 1e-3)[0] == [
        1, 0, 1, 1, 1, 1,
    ]  # fmt: skip
    got, metrics = corrected(sequence_mask_metric="geometric", geo_mask_low=0.6, geo_mask_high=mean - 1e-3)
    assert got == [0, 0, 0, 0, 1, 1]
    assert metrics["geo_sequence_mask_masked_ratio"] == pytest.approx(2 / 3)
    assert metrics["geo_sequence_mask_over_high_ratio"] == pytest.approx(1 / 3)
    assert metrics["geo_sequence_mask_under_low_ratio"] == pytest.approx(1 / 3)


def test_a_sequence_with_an_outlier_is_left_out_whole() -> None:
    got, metrics = corrected(outlier_token_is_threshold_high=3.0)
    assert got == [0, 0, 0, 1, 1, 1]
    assert metrics["outlier_seq_masked_ratio"] == metrics["outlier_seq_over_high_ratio"] == pytest.approx(1 / 3)
    assert metrics["outlier_seq_under_low_ratio"] == 0
    got, metrics = corrected(outlier_token_is_threshold_low=0.6)
    assert got == [1, 0, 1, 0, 1, 1]
    assert metrics["outlier_seq_under_low_ratio"] == pytest.approx(1 / 3)


def test_single_tokens_are_left_out() -> None:
    got, metrics = corrected(token_mask_is_threshold_low=0.6, token_mask_is_threshold_high=3.0)
    assert got == [1, 0, 0, 0, 1, 1]
    assert metrics["token_mask_ratio"] == pytest.approx(2 / 5)


def test_a_token_that_is_left_out_is_not_in_the_ratio_of_its_sequence() -> None:
    tokens = {"token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 3.0}
    assert corrected(tis_ratio_type="sequence", **tokens)[0] == [2.0, 0, 0, 0.5, 1, 1]
    assert corrected(sequence_mask_metric="product", product_mask_low=0.4, product_mask_high=2.1, **tokens)[0] == [
        1,
        0,
        0,
        1,
        1,
        1,
    ]


def test_a_ratio_and_a_mask_work_together() -> None:
    got, _ = corrected(tis_ratio_type="token", sequence_mask_metric="product", product_mask_low=0.6)
    assert got == [0, 0, 0, 0, 1, 1]


def test_the_ratio_does_not_overflow() -> None:
    far = batch().with_tensors(old_logprobs_T=torch.full((6,), 500.0))
    algorithm = AlgorithmConfig.model_validate({
        "off_policy_correction": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1e12}
    })  # fmt: skip
    weights, metrics = correction(far, algorithm)
    assert float(weights.max()) == metrics["is_ratio_max"] == pytest.approx(math.exp(20.0))


def test_a_missing_logprob_of_a_trained_token_is_refused() -> None:
    broken = batch().with_tensors(rollout_logprobs_T=torch.full((6,), NAN))
    algorithm = AlgorithmConfig.model_validate({"off_policy_correction": {"tis_ratio_type": "token"}})
    with pytest.raises(ValueError, match=r"off_policy_correction: the servers gave no logprob for 5 of 5 sampled"):
        correction(broken, algorithm)


def test_the_correction_multiplies_the_weights_of_the_policy_loss_and_leaves_the_kl() -> None:
    plain = AlgorithmConfig()
    settings = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}
    corrected = AlgorithmConfig.model_validate({"off_policy_correction": settings})
    before, normalisers = prepare(batch(), plain, world_size=1)
    assert normalisers.known == {}
    after, normalisers = prepare(batch(), corrected, world_size=1)
    factors = torch.tensor([2, 0, 3, 0.5, 1, 1], dtype=torch.float64)
    assert_close(after.loss_weights_T, before.loss_weights_T * factors, atol=1e-6, rtol=0)
    assert_close(after.kl_weights_T, before.kl_weights_T)
    assert normalisers.known["policy/loss_metrics/tis_token_clip_high_ratio"] == pytest.approx(1 / 5)
    assert normalisers.known["policy/loss_metrics/is_ratio_max"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({}, True),
        ({"policy_loss_type": "rollout_is"}, False),
        ({"policy_loss_type": "dppo"}, False),
        ({"policy_loss_type": "cispo"}, True),
        ({"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}}, False),
        ({"policy_loss_type": "dppo", "use_kl_in_reward": True}, True),
        ({"policy_loss_type": "rollout_is", "off_policy_correction": {"sequence_mask_metric": "geometric"}}, True),
    ],
)
def test_the_policy_scores_a_batch_only_where_something_looks_at_it(algorithm: dict[str, object], needed: bool) -> None:
    cfg = AlgorithmConfig.model_validate({"use_kl_loss": False} | algorithm)
    assert needs_old_logprobs(cfg) is needed
    unscored = batch().with_tensors(old_logprobs_T=None)
    if needed:
        with pytest.raises(ValueError, match="no old_logprobs_T"):
            prepare(unscored, cfg, world_size=1)
    else:
        prepare(unscored, cfg, world_size=1)


def test_a_loss_on_the_rollouts_logprobs_refuses_a_batch_without_them() -> None:
    missing = batch().with_tensors(rollout_logprobs_T=torch.full((6,), NAN))
    with pytest.raises(ValueError, match="policy_loss_type=rollout_is: the servers gave no logprob for 5 of 5"):
        prepare(missing, AlgorithmConfig(policy_loss_type="rollout_is"), world_size=1)
