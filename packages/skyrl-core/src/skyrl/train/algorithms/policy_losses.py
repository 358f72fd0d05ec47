"""Which policy loss a name means.

A loss sees flat response tokens of whole sequences and returns one value per token, before it is weighted and summed;
reductions are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyrl.train.algorithms.losses.cispo import cispo
from skyrl.train.algorithms.losses.clipped import dual_clip, regular
from skyrl.train.algorithms.losses.covariance import clip_cov, kl_cov
from skyrl.train.algorithms.losses.dppo import dppo
from skyrl.train.algorithms.losses.gspo import gspo
from skyrl.train.algorithms.losses.inputs import LossInputs, PolicyLoss, TokenLoss, policy_ratio
from skyrl.train.algorithms.losses.rollout_is import rollout_is
from skyrl.train.algorithms.losses.sapo import sapo
from skyrl.train.algorithms.losses.unclipped import cross_entropy, importance_sampling
from skyrl.train.algorithms.padded import as_policy_loss
from skyrl.train.algorithms.tables import Table

__all__ = ["POLICY_LOSSES", "LossInputs", "PolicyLoss", "TokenLoss", "policy_ratio", "register_policy_loss"]

POLICY_LOSSES: Table[PolicyLoss] = Table(
    "trainer.algorithm.policy_loss_type",
    {
        "regular": regular,
        "dual_clip": dual_clip,
        "gspo": gspo,
        "cispo": cispo,
        "sapo": sapo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "rollout_is": rollout_is,
        "dppo": dppo,
        "cross_entropy": cross_entropy,
        "importance_sampling": importance_sampling,
    },
    adapted=as_policy_loss,
)


def register_policy_loss(name: str, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Makes `trainer.algorithm.policy_loss_type=name` mean this function, in every worker started afterwards: a
    `PolicyLoss`, or one of the public form (`padded.PaddedLoss`). Without `loss` it decorates the function. ValueError
    for a name that is taken."""
    return POLICY_LOSSES.register(name, loss)
