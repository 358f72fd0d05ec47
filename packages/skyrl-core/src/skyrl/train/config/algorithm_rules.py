"""Rules between the keys of `trainer.algorithm`: which names are known, and what excludes or needs what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skyrl.train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl.train.algorithms.anchors import corrects_off_policy
from skyrl.train.algorithms.dynamic_sampling import DYNAMIC_SAMPLING
from skyrl.train.algorithms.kl import KL_ESTIMATORS
from skyrl.train.algorithms.kl_in_reward import KL_CONTROLS
from skyrl.train.algorithms.losses.covariance import SELECTIONS
from skyrl.train.algorithms.losses.dppo import DIVERGENCES
from skyrl.train.algorithms.off_policy import SEQUENCE_MASKS, TIS_RATIOS
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES
from skyrl.train.algorithms.reductions import LOSS_REDUCTIONS
from skyrl.train.algorithms.tables import Table
from skyrl.train.config.problems import listed

A = "trainer.algorithm"
CORRECTION = f"{A}.off_policy_correction"

TABLES: tuple[Table[Any], ...] = (
    ADVANTAGE_ESTIMATORS, POLICY_LOSSES, LOSS_REDUCTIONS, KL_ESTIMATORS, KL_CONTROLS, DIVERGENCES, TIS_RATIOS,
    SEQUENCE_MASKS, DYNAMIC_SAMPLING,
)  # fmt: skip


def names(cfg: Any) -> Iterator[str]:
    """Names that index a table of functions; users add theirs with the table's `register`."""
    for functions in TABLES:
        name = cfg
        for part in functions.key.split("."):
            name = getattr(name, part)
        if name is not None and name not in functions:
            yield f"{functions.key}={name}: {listed(name, functions)}"


def reductions_and_estimators(cfg: Any) -> Iterator[str]:
    """What a reduction or an estimator needs besides its name."""
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        yield f"{A}.loss_reduction=seq_mean_token_sum_norm divides by {A}.max_seq_len: set it"
    if algorithm.advantage_estimator == "gae" and cfg.trainer.critic.model.path is None:
        yield (
            f"{A}.advantage_estimator=gae needs the values of a critic: set trainer.critic.model.path, usually to "
            f"trainer.policy.model.path, or take an estimator that needs none, such as grpo, rloo or reinforce++"
        )


def kl_terms(cfg: Any) -> Iterator[str]:
    """One KL term, not two."""
    if cfg.trainer.algorithm.use_kl_loss and cfg.trainer.algorithm.use_kl_in_reward:
        yield (
            f"{A}.use_kl_in_reward=true and {A}.use_kl_loss=true (its default) would count the KL twice: set one of "
            f"them to false"
        )


def off_policy(cfg: Any) -> Iterator[str]:
    """Bounds that leave something between them, and losses that a correction fits."""
    algorithm = cfg.trainer.algorithm
    settings, loss = algorithm.off_policy_correction, algorithm.policy_loss_type
    yield from _bounds(settings)
    if loss == "cispo" and algorithm.cispo.cispo_anchor == "rollout" and settings.tis_ratio_type is not None:
        yield (
            f"{CORRECTION}.tis_ratio_type={settings.tis_ratio_type}: with {A}.cispo.cispo_anchor=rollout the loss "
            f"takes its own ratio to the rollout's logprobs, which would count twice: leave one of them out"
        )
    if not corrects_off_policy(algorithm):
        return
    if loss in SELECTIONS or loss == "cross_entropy":
        yield f"{CORRECTION}.* does not go with {A}.policy_loss_type={loss}: leave the correction out"
    if algorithm.old_logprobs == "rollout":
        yield (
            f"{CORRECTION}.* has nothing to correct where {A}.old_logprobs=rollout takes the rollout's logprobs for "
            f"the old ones: set it to recompute"
        )


def _bounds(settings: Any) -> Iterator[str]:
    low, high = settings.token_mask_is_threshold_low, settings.token_mask_is_threshold_high
    if (low is None) != (high is None):
        given, missing = ("high", "low") if low is None else ("low", "high")
        yield (
            f"{CORRECTION}.token_mask_is_threshold_{given} is set without token_mask_is_threshold_{missing}: set both, "
            f"or neither"
        )
    for low_name, high_name in (
        ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
        ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
        ("geo_mask_low", "geo_mask_high"),
        ("product_mask_low", "product_mask_high"),
    ):
        low, high = getattr(settings, low_name), getattr(settings, high_name)
        if low is not None and high is not None and low >= high:
            yield f"{CORRECTION}.{low_name}={low} must be below {CORRECTION}.{high_name}={high}: nothing lies between"


def overlong(cfg: Any) -> Iterator[str]:
    """A buffer that lies within a response of one turn."""
    buffer, longest = cfg.trainer.algorithm.overlong_buffer_len, cfg.generator.sampling_params.max_generate_length
    if buffer > longest:
        yield (
            f"{A}.overlong_buffer_len={buffer} must be at most generator.sampling_params.max_generate_length="
            f"{longest}: it is the last part of a response"
        )
    if buffer and cfg.generator.max_turns > 1:
        yield (
            f"{A}.overlong_buffer_len={buffer} measures responses of one turn, and generator.max_turns="
            f"{cfg.generator.max_turns}: set it to 0"
        )


RULES: tuple[Callable[[Any], Iterator[str]], ...] = (
    names, reductions_and_estimators, kl_terms, off_policy, overlong,
)  # fmt: skip
