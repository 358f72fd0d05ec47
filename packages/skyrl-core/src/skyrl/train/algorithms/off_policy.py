"""How much each token still counts where the trainer's old policy is not the policy that the servers sampled from.

With the ratio r = exp(old_logp - rollout_logp) of a token, exponents clamped to [-20, 20], in this order: sequences
with an outlier token are left out, single tokens are left out, what is left is weighed by a truncated ratio, and
sequences are left out by their own ratio. Everything is over the whole mini-batch, before it is cut.

Sources: truncated importance sampling (fengyao.notion.site/off-policy-rl), sequence masks as in verl's rollout
correction. Against public SkyRL three things are mended: each part works without the others; the statistics of r are
over trained tokens and not over padding; a ratio that NaN has touched is refused instead of multiplied in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from skyrl.train.algorithms.anchors import sampled_logprobs
from skyrl.train.algorithms.segments import segment_sum
from skyrl.train.algorithms.tables import Table
from skyrl.train.policy.batch import TrajectoryBatch

LOG_RATIO_LIMIT = 20.0
KEY = "trainer.algorithm.off_policy_correction"

Metrics = dict[str, float]


@dataclass(frozen=True)
class Drift:
    """How far the old policy is from the sampling policy: `log_ratio_T` float64, 0 where `trained_T` (bool) is false;
    `segments_T` numbers the sequences 0..`num_sequences` - 1."""

    log_ratio_T: torch.Tensor
    trained_T: torch.Tensor
    segments_T: torch.Tensor
    num_sequences: int

    @property
    def ratio_T(self) -> torch.Tensor:
        return _exp(self.log_ratio_T)

    def without(self, dropped_T: torch.Tensor) -> Drift:
        """The same with these tokens no longer trained on."""
        kept_T = self.trained_T & ~dropped_T
        return Drift(torch.where(kept_T, self.log_ratio_T, 0.0), kept_T, self.segments_T, self.num_sequences)

    def sequence_log_ratio_S(self) -> torch.Tensor:
        """Sum over the trained tokens of each sequence."""
        return segment_sum(self.log_ratio_T, self.segments_T, self.num_sequences)

    def tokens_S(self) -> torch.Tensor:
        return segment_sum(self.trained_T.double(), self.segments_T, self.num_sequences)

    def share_of_tokens(self, chosen_T: torch.Tensor) -> float:
        return float((chosen_T & self.trained_T).sum() / self.trained_T.sum().clamp(min=1))

    def share_of_sequences(self, chosen_S: torch.Tensor) -> float:
        return float(chosen_S.sum() / max(self.num_sequences, 1))


def correction(minibatch: TrajectoryBatch, algorithm: Any) -> tuple[torch.Tensor, Metrics]:
    """(float64 [T] that multiplies each token's weight in the policy loss, metrics by their public names).

    ValueError where a server gave no logprob for a trained token.
    """
    settings, trained_T = algorithm.off_policy_correction, minibatch.loss_mask_T > 0
    sampled_T = sampled_logprobs(minibatch, key=KEY, instead="switch the correction off").double()
    log_ratio_T = torch.where(trained_T, minibatch.require("old_logprobs_T").double() - sampled_T, 0.0)
    drift = Drift(log_ratio_T, trained_T, minibatch.segment_ids_T, minibatch.num_sequences)
    metrics = ratio_statistics(drift)
    for step in (drop_outlier_sequences, drop_tokens):
        dropped_T, found = step(drift, settings)
        drift, metrics = drift.without(dropped_T), metrics | found
    weights_T = drift.trained_T.double()
    if settings.tis_ratio_type is not None:
        ratio_T, found = TIS_RATIOS.pick(settings.tis_ratio_type)(drift, settings)
        weights_T, metrics = weights_T * ratio_T, metrics | found
    if settings.sequence_mask_metric is not None:
        kept_S, found = SEQUENCE_MASKS.pick(settings.sequence_mask_metric)(drift, settings)
        weights_T, metrics = weights_T * kept_S[drift.segments_T], metrics | found
    return weights_T, metrics


def ratio_statistics(drift: Drift) -> Metrics:
    """is_ratio_{mean,std,max,min} over trained tokens, the standard deviation with divisor n."""
    ratio = drift.ratio_T[drift.trained_T]
    if not ratio.numel():
        return {}
    return {
        "is_ratio_mean": float(ratio.mean()),
        "is_ratio_std": float(ratio.std(unbiased=False)),
        "is_ratio_max": float(ratio.max()),
        "is_ratio_min": float(ratio.min()),
    }


def drop_outlier_sequences(drift: Drift, settings: Any) -> tuple[torch.Tensor, Metrics]:
    """(bool [T] all tokens of sequences with any token outside the `outlier_token_is_threshold`s, metrics)."""
    low, high = settings.outlier_token_is_threshold_low, settings.outlier_token_is_threshold_high
    if low is None and high is None:
        return torch.zeros_like(drift.trained_T), {}
    under_T, over_T = _outside(drift.ratio_T, low, high)
    under_S, over_S = (_any_of_sequence(drift, chosen_T) for chosen_T in (under_T, over_T))
    dropped_S = under_S | over_S
    return dropped_S[drift.segments_T], {
        "outlier_seq_masked_ratio": drift.share_of_sequences(dropped_S),
        "outlier_seq_over_high_ratio": drift.share_of_sequences(over_S),
        "outlier_seq_under_low_ratio": drift.share_of_sequences(under_S),
    }


def drop_tokens(drift: Drift, settings: Any) -> tuple[torch.Tensor, Metrics]:
    """(bool [T] tokens outside the `token_mask_is_threshold`s, metrics)."""
    low, high = settings.token_mask_is_threshold_low, settings.token_mask_is_threshold_high
    if low is None and high is None:
        return torch.zeros_like(drift.trained_T), {}
    under_T, over_T = _outside(drift.ratio_T, low, high)
    return under_T | over_T, {"token_mask_ratio": drift.share_of_tokens(under_T | over_T)}


def token_ratio(drift: Drift, settings: Any) -> tuple[torch.Tensor, Metrics]:
    """min(r, `token_tis_ratio_clip_high`) for each token."""
    ceiling = settings.token_tis_ratio_clip_high
    ratio_T = drift.ratio_T
    return ratio_T.clamp(max=ceiling), {"tis_token_clip_high_ratio": drift.share_of_tokens(ratio_T > ceiling)}


def sequence_ratio(drift: Drift, settings: Any) -> tuple[torch.Tensor, Metrics]:
    """min(product of r over the sequence, `sequence_tis_ratio_clip_high`), the same for all tokens of a sequence."""
    ceiling = settings.sequence_tis_ratio_clip_high
    ratio_S = _exp(drift.sequence_log_ratio_S())
    metrics = {"tis_seq_clip_high_ratio": drift.share_of_sequences(ratio_S > ceiling)}
    return ratio_S.clamp(max=ceiling)[drift.segments_T], metrics


def keep_by_product(drift: Drift, settings: Any) -> tuple[torch.Tensor, Metrics]:
    """1 for sequences whose product of r lies within [`product_mask_low`, `product_mask_high`], else 0."""
    ratio_S = _exp(drift.sequence_log_ratio_S())
    return _kept(drift, ratio_S, settings.product_mask_low, settings.product_mask_high, name="product")


def keep_by_geometric_mean(drift: Drift, settings: Any) -> tuple[torch.Tensor, Metrics]:
    """1 for sequences whose geometric mean of r lies within [`geo_mask_low`, `geo_mask_high`], else 0."""
    ratio_S = _exp(drift.sequence_log_ratio_S() / drift.tokens_S().clamp(min=1))
    return _kept(drift, ratio_S, settings.geo_mask_low, settings.geo_mask_high, name="geo")


Step = Callable[[Drift, Any], tuple[torch.Tensor, Metrics]]

TIS_RATIOS: Table[Step] = Table(f"{KEY}.tis_ratio_type", {"token": token_ratio, "sequence": sequence_ratio})
SEQUENCE_MASKS: Table[Step] = Table(
    f"{KEY}.sequence_mask_metric", {"product": keep_by_product, "geometric": keep_by_geometric_mean}
)


def _kept(drift: Drift, ratio_S: torch.Tensor, low: float, high: float, *, name: str) -> tuple[torch.Tensor, Metrics]:
    under_S, over_S = _outside(ratio_S, low, high)
    return (~(under_S | over_S)).double(), {
        f"{name}_sequence_mask_masked_ratio": drift.share_of_sequences(under_S | over_S),
        f"{name}_sequence_mask_over_high_ratio": drift.share_of_sequences(over_S),
        f"{name}_sequence_mask_under_low_ratio": drift.share_of_sequences(under_S),
    }


def _outside(ratio: torch.Tensor, low: float | None, high: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(below `low`, above `high`); an unset bound bounds nothing."""
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return nothing if low is None else ratio < low, nothing if high is None else ratio > high


def _any_of_sequence(drift: Drift, chosen_T: torch.Tensor) -> torch.Tensor:
    counts_S = segment_sum((chosen_T & drift.trained_T).double(), drift.segments_T, drift.num_sequences)
    return counts_S > 0


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
