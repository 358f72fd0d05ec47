"""How far the policy is from the reference, estimated per sampled token.

With d = log pi(a) - log pi_ref(a) on tokens drawn from pi (Schulman, "Approximating KL divergence", 2020).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyrl.train.algorithms.tables import Table

KlEstimator = Callable[[torch.Tensor], torch.Tensor]

K3_DELTA_LIMIT = 20.0
K3_VALUE_LIMIT = 10.0


def k1(delta_T: torch.Tensor) -> torch.Tensor:
    """d: unbiased, high variance."""
    return delta_T


def absolute(delta_T: torch.Tensor) -> torch.Tensor:
    """|d|."""
    return delta_T.abs()


def k2(delta_T: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, its gradient is the KL's."""
    return delta_T.square() / 2


def k3(delta_T: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d: unbiased, never negative; d clamped to [-20, 20], the value to [-10, 10]."""
    minus_delta_T = (-delta_T).clamp(-K3_DELTA_LIMIT, K3_DELTA_LIMIT)
    return (minus_delta_T.exp() - 1 - minus_delta_T).clamp(-K3_VALUE_LIMIT, K3_VALUE_LIMIT)


KL_ESTIMATORS: Table[KlEstimator] = Table(
    "trainer.algorithm.kl_estimator_type", {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
)


def token_kl(
    logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor, *, estimator: str
) -> torch.Tensor:
    """[T]: the estimate on trained tokens, exactly 0 elsewhere even where a logprob is NaN."""
    trained_T = loss_mask_T > 0
    delta_T = torch.where(trained_T, logprobs_T - ref_logprobs_T, torch.zeros_like(logprobs_T))
    return KL_ESTIMATORS.pick(estimator)(delta_T)
