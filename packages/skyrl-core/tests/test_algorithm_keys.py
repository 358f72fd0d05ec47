"""Each key of `trainer.algorithm` changes what is computed: one case per key, and no key without a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import batch_of
from skyrl.train.algorithms.advantages import estimate
from skyrl.train.algorithms.critic import critic_loss
from skyrl.train.algorithms.kl_in_reward import next_coefficient, penalise
from skyrl.train.algorithms.objective import micro_loss
from skyrl.train.algorithms.reward_shaping import shape
from skyrl.train.config import AlgorithmConfig, schema
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.minibatch import needs_present_logprobs, prepare, prepare_for_critic

SIZES = (5, 3, 4, 1, 2, 1, 3, 2)
TOTAL = sum(SIZES)


def batch() -> TrajectoryBatch:
    """Eight sequences of four groups with rewards, values and three kinds of logprobs that lie far enough apart."""
    draw = torch.Generator().manual_seed(3)

    def around(centre: float, spread: float) -> torch.Tensor:
        return centre + spread * torch.randn(TOTAL, generator=draw)

    rewards = [around(0.0, 1.0)[:n].tolist() for n in SIZES]
    return batch_of(rewards, groups=[0, 0, 1, 1, 2, 2, 3, 3]).with_tensors(
        old_logprobs_T=around(-2, 0.6),
        ref_logprobs_T=around(-2, 0.5),
        rollout_logprobs_T=around(-2, 0.6),
        values_T=around(0, 1),
    )


PRESENT = torch.linspace(-2.6, -1.4, TOTAL, dtype=torch.float64)


def gradient(algorithm: AlgorithmConfig) -> list[float]:
    """Of the whole loss with respect to logprobs and entropy."""
    present = PRESENT if needs_present_logprobs(algorithm) else None
    draw = torch.Generator().manual_seed(4)
    scored = batch().with_tensors(advantages_T=2 * torch.randn(TOTAL, generator=draw))
    prepared, known = prepare(scored, algorithm, world_size=1, micro_batch_size=2, present_logprobs_T=present)
    logprobs, entropy = PRESENT.clone().requires_grad_(), torch.ones(TOTAL, dtype=torch.float64).requires_grad_()
    micro_loss(prepared, logprobs, entropy, algorithm, num_tokens=known.num_tokens)[0].backward()
    assert logprobs.grad is not None
    return [*logprobs.grad.tolist(), *([] if entropy.grad is None else entropy.grad.tolist())]


def critic_gradient(algorithm: AlgorithmConfig) -> list[float]:
    draw = torch.Generator().manual_seed(4)
    prepared, known = prepare_for_critic(
        batch().with_tensors(returns_T=torch.randn(TOTAL, generator=draw)), algorithm, world_size=1
    )
    values = (prepared.require("values_T").double() + 0.1 * PRESENT).requires_grad_()
    critic_loss(prepared, values, algorithm, num_tokens=known.num_tokens)[0].backward()
    assert values.grad is not None
    return values.grad.tolist()


def advantages(algorithm: AlgorithmConfig) -> list[float]:
    return estimate(batch(), algorithm).require("advantages_T").tolist()


def penalised(algorithm: AlgorithmConfig) -> list[float]:
    return penalise(batch(), algorithm, algorithm.kl_loss_coef)[0].rewards_T.tolist()


def coefficient(algorithm: AlgorithmConfig) -> float:
    return next_coefficient(1.0, 0.11, 10, algorithm)


def shaped(algorithm: AlgorithmConfig) -> list[float]:
    made = shape(batch().with_tensors(rewards_T=torch.full((TOTAL,), 0.5)), algorithm, max_response_len=5)[0]
    return [*made.rewards_T.tolist(), *made.loss_mask_T.tolist()]


Case = tuple[Callable[[AlgorithmConfig], Any], dict[str, Any], Any]


def loss(name: str) -> dict[str, Any]:
    return {"policy_loss_type": name}


def correction(**settings: Any) -> dict[str, Any]:
    return {"off_policy_correction": settings}


GEOMETRIC, PRODUCT = correction(sequence_mask_metric="geometric"), correction(sequence_mask_metric="product")

# key -> (what is computed, the other keys, the value that changes it)
CASES: dict[str, Case] = {
    "advantage_estimator": (advantages, {}, "rloo"),
    "policy_loss_type": (gradient, {}, "gspo"),
    "loss_reduction": (gradient, {}, "token_mean_legacy"),
    "use_kl_loss": (gradient, {}, False),
    "kl_loss_coef": (gradient, {}, 0.5),
    "kl_estimator_type": (penalised, {"kl_loss_coef": 1.0}, "k1"),
    "kl_ctrl.type": (coefficient, {}, "adaptive"),
    "kl_ctrl.kl_target": (coefficient, {"kl_ctrl": {"type": "adaptive"}}, 0.105),
    "kl_ctrl.horizon": (coefficient, {"kl_ctrl": {"type": "adaptive"}}, 77),
    "use_entropy_loss": (gradient, {}, True),
    "entropy_loss_coef": (gradient, {"use_entropy_loss": True}, 0.5),
    "gamma": (advantages, {"advantage_estimator": "reinforce++"}, 0.5),
    "lambd": (advantages, {"advantage_estimator": "gae"}, 0.5),
    "value_clip": (critic_gradient, {}, 0.01),
    "grpo_norm_by_std": (advantages, {}, False),
    "advantage_batch_normalize": (gradient, {}, True),
    "zero_variance_filter": (shaped, {"zero_variance_filter_tol": 9.0}, True),
    "zero_variance_filter_tol": (shaped, {"zero_variance_filter": True}, 9.0),
    "overlong_buffer_len": (shaped, {}, 2),
    "overlong_buffer_penalty_factor": (shaped, {"overlong_buffer_len": 2}, 0.5),
    "eps_clip_low": (gradient, {}, 0.9),
    "eps_clip_high": (gradient, {}, 9.0),
    "clip_ratio_c": (gradient, loss("dual_clip"), 1.01),
    "max_seq_len": (gradient, {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 9}, 10),
    "off_policy_correction.tis_ratio_type": (gradient, {}, "token"),
    "off_policy_correction.token_tis_ratio_clip_high": (gradient, correction(tis_ratio_type="token"), 0.9),
    "off_policy_correction.sequence_tis_ratio_clip_high": (gradient, correction(tis_ratio_type="sequence"), 0.9),
    "off_policy_correction.sequence_mask_metric": (gradient, {}, "geometric"),
    "off_policy_correction.geo_mask_high": (gradient, GEOMETRIC, 9.0),
    "off_policy_correction.geo_mask_low": (gradient, GEOMETRIC, 0.1),
    "off_policy_correction.product_mask_high": (gradient, PRODUCT, 9.0),
    "off_policy_correction.product_mask_low": (gradient, PRODUCT, 0.01),
    "off_policy_correction.outlier_token_is_threshold_low": (gradient, {}, 0.8),
    "off_policy_correction.outlier_token_is_threshold_high": (gradient, {}, 1.2),
    "off_policy_correction.token_mask_is_threshold_low": (gradient, {}, 0.8),
    "off_policy_correction.token_mask_is_threshold_high": (gradient, {}, 1.2),
    "sapo.tau_pos": (gradient, loss("sapo"), 3.0),
    "sapo.tau_neg": (gradient, loss("sapo"), 3.0),
    "cispo.cispo_eps_clip_low": (gradient, loss("cispo"), 0.1),
    "cispo.cispo_eps_clip_high": (gradient, loss("cispo"), 0.1),
    "cispo.cispo_anchor": (gradient, loss("cispo"), "rollout"),
    "clip_cov.clip_ratio": (gradient, loss("clip_cov") | {"clip_cov": {"clip_cov_lb": 0.0}}, 0.9),
    "clip_cov.clip_cov_lb": (gradient, loss("clip_cov") | {"clip_cov": {"clip_ratio": 1.0, "clip_cov_ub": 9.0}}, 0.1),
    "clip_cov.clip_cov_ub": (gradient, loss("clip_cov") | {"clip_cov": {"clip_ratio": 1.0, "clip_cov_lb": 0.0}}, 0.3),
    "kl_cov.kl_cov_frac": (gradient, loss("kl_cov"), 0.9),
    "kl_cov.ppo_kl_coef": (gradient, loss("kl_cov"), 0.1),
    "dppo.dppo_type": (gradient, loss("dppo") | {"dppo": {"delta_low": 0.02, "delta_high": 0.02}}, "binary_kl"),
    "dppo.delta_low": (gradient, loss("dppo"), 0.001),
    "dppo.delta_high": (gradient, loss("dppo"), 0.001),
}

# Keys that only a whole run shows, and the test that does.
ELSEWHERE = {
    "old_logprobs": "test_old_logprobs.py",
    "temperature": "test_policy_group.py",
    "value_head_prefix": "test_value_model.py",
    "use_kl_in_reward": "test_algorithm_runs.py",
    "dynamic_sampling.type": "test_dynamic_sampling.py",
    "dynamic_sampling.max_sample_batches": "test_dynamic_sampling.py",
    "dynamic_sampling.min_replace_ratio": "test_dynamic_sampling.py",
}


def changed(keys: dict[str, Any], dotted: str, value: Any) -> AlgorithmConfig:
    section, _, name = dotted.rpartition(".")
    return AlgorithmConfig.model_validate(
        keys | ({section: keys.get(section, {}) | {name: value}} if section else {name: value})
    )


@pytest.mark.parametrize("dotted", list(CASES))
def test_the_key_changes_what_is_computed(dotted: str) -> None:
    compute, keys, value = CASES[dotted]
    before, after = compute(AlgorithmConfig.model_validate(keys)), compute(changed(keys, dotted, value))
    assert before != after


def test_every_key_of_the_algorithm_has_a_case() -> None:
    assert set(schema.key_names(AlgorithmConfig)) == CASES.keys() | ELSEWHERE.keys()
