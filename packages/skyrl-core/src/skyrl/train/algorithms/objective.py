"""The whole loss of one micro-batch: policy loss + KL to the reference - entropy, each over global normalisers.

Every part is a sum over tokens of (value x weight), and the weights come from the whole mini-batch; the sums of all
micro-batches on all ranks are the mini-batch's loss and metrics. So entropy is the mean over the mini-batch's tokens,
where public SkyRL takes the mean of its micro-batches' means.
"""

from __future__ import annotations

from typing import Any

import torch

from skyrl.train.algorithms.kl import token_kl
from skyrl.train.algorithms.losses.inputs import log_ratio_to
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.shares import extreme


def micro_loss(
    micro: TrajectoryBatch,
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor | None,
    algorithm: Any,
    *,
    num_tokens: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss with gradient, this micro-batch's share of each metric by its public name).

    `micro` carries `loss_weights_T` and `kl_weights_T`; `num_tokens` counts the trained tokens of the whole mini-batch.
    Shares add up, but for those named `_max` or `_min` (`policy.shares.combine`).
    """
    dtype = logprobs_T.dtype
    inputs = _loss_inputs(micro, logprobs_T)
    token_loss = POLICY_LOSSES.pick(algorithm.policy_loss_type)(inputs, algorithm)
    weights_T = micro.require("loss_weights_T").to(dtype)
    policy_loss = (token_loss.loss_T if token_loss.weighed else token_loss.loss_T * weights_T).sum()
    mean_weights_T = (micro.loss_mask_T.double() / max(num_tokens, 1.0)).to(dtype)
    loss, shares = policy_loss, {"policy_loss": policy_loss}
    if algorithm.use_kl_loss:
        kl = _kl(micro, logprobs_T, algorithm)
        loss = loss + algorithm.kl_loss_coef * kl
        shares["policy_kl"] = kl
    if entropy_T is not None:
        entropy = (entropy_T * mean_weights_T).sum()
        loss = loss - algorithm.entropy_loss_coef * entropy if algorithm.use_entropy_loss else loss
        shares["policy_entropy"] = entropy
    reported = {f"loss_metrics/{name}": values_T for name, values_T in token_loss.metrics_T.items()}
    for name, values_T in (reported | _rollout_gap(micro, inputs)).items():
        if name.endswith(("_max", "_min")):
            shares[name] = extreme(name, values_T.to(dtype), micro.loss_mask_T > 0)
        else:
            shares[name] = (values_T.to(dtype) * mean_weights_T).sum()
    shares["final_loss"] = loss
    return loss, {f"policy/{name}": share.detach() for name, share in shares.items()}


def _kl(micro: TrajectoryBatch, logprobs_T: torch.Tensor, algorithm: Any) -> torch.Tensor:
    """Mean over sequences of each one's mean KL over trained tokens, whatever `loss_reduction` is."""
    kl_T = token_kl(
        logprobs_T,
        micro.require("ref_logprobs_T").to(logprobs_T.dtype),
        micro.loss_mask_T,
        estimator=algorithm.kl_estimator_type,
    )
    return (kl_T * micro.require("kl_weights_T").to(logprobs_T.dtype)).sum()


def _rollout_gap(micro: TrajectoryBatch, inputs: LossInputs) -> dict[str, torch.Tensor]:
    """|logp - rollout_logp| where the policy did not score the batch before: nothing else tells how far the two are."""
    if micro.old_logprobs_T is not None:
        return {}
    gap_T = log_ratio_to(inputs, inputs.rollout_logprobs_T).detach().abs()
    return {f"minibatch_rollout_logprobs_abs_diff_{what}": gap_T for what in ("mean", "max", "min")}


def _loss_inputs(micro: TrajectoryBatch, logprobs_T: torch.Tensor) -> LossInputs:
    dtype = logprobs_T.dtype
    # a loss that is anchored on the rollout is not given other old logprobs, and needs none
    old_logprobs_T = micro.rollout_logprobs_T if micro.old_logprobs_T is None else micro.old_logprobs_T
    return LossInputs(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T.to(dtype),
        advantages_T=micro.require("advantages_T").to(dtype),
        loss_mask_T=micro.loss_mask_T,
        segment_ids_T=micro.segment_ids_T,
        group_ids_T=micro.group_ids_T,
        positions_T=micro.positions_T,
        rollout_logprobs_T=micro.rollout_logprobs_T.to(dtype),
        selected_T=micro.selected_T,
        loss_weights_T=micro.loss_weights_T,
    )
