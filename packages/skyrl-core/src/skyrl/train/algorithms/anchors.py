"""Which logprobs an update needs besides the policy's own: those before the update, the servers', or both."""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.policy.batch import TrajectoryBatch

ROLLOUT_ANCHORED = ("rollout_is", "dppo")
"""Policy losses whose ratio is taken to the servers' sampling policy."""


def anchored_on_rollout(algorithm: Any) -> bool:
    """Whether the loss looks at the servers' logprobs and not at the policy's before the update."""
    loss = algorithm.policy_loss_type
    return loss in ROLLOUT_ANCHORED or (loss == "cispo" and algorithm.cispo.cispo_anchor == "rollout")


def corrects_off_policy(algorithm: Any) -> bool:
    """Whether any part of `trainer.algorithm.off_policy_correction` is on. Each part works by itself; in public SkyRL
    the thresholds of tokens do nothing unless a ratio or a sequence mask is chosen too."""
    settings = algorithm.off_policy_correction
    switches = (
        settings.tis_ratio_type,
        settings.sequence_mask_metric,
        settings.outlier_token_is_threshold_low,
        settings.outlier_token_is_threshold_high,
        settings.token_mask_is_threshold_low,
        settings.token_mask_is_threshold_high,
    )
    return any(switch is not None for switch in switches)


def needs_old_logprobs(algorithm: Any) -> bool:
    """Whether the policy must score a batch before it is updated."""
    return not anchored_on_rollout(algorithm) or algorithm.use_kl_in_reward or corrects_off_policy(algorithm)


def sampled_logprobs(batch: TrajectoryBatch, *, key: str, instead: str) -> torch.Tensor:
    """[T]: the servers' own logprobs, 0 on tokens that are not trained on.

    ValueError where a server could not say one; `key` is what needs them and `instead` what to do.
    """
    trained_T = batch.loss_mask_T > 0
    missing = int((trained_T & batch.rollout_logprobs_T.isnan()).sum())
    if missing:
        raise ValueError(
            f"{key}: the servers gave no logprob for {missing} of {int(trained_T.sum())} sampled tokens: {instead}"
        )
    return torch.where(trained_T, batch.rollout_logprobs_T, 0.0)
