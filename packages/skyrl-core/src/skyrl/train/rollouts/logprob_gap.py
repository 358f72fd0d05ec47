"""How far the trainer's logprobs lie from those that the rollout server reported for the same sampled tokens."""

from __future__ import annotations

import torch

from skyrl.train.policy.batch import TrajectoryBatch


def logprob_gap_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    """`policy/rollout_train_logprobs_abs_diff_{mean,std,max,min}`: |old - rollout| over sampled tokens that may be
    trained on, in nats.

    Tokens of which either side is not finite are counted in `policy/rollout_train_logprobs_num_invalid` and left out;
    without any old logprobs, or any token left, only that count is returned.
    """
    if batch.old_logprobs_T is None:
        return {}
    trained_T = batch.loss_mask_T > 0
    gap = (batch.old_logprobs_T - batch.rollout_logprobs_T)[trained_T].double().abs()
    finite = torch.isfinite(gap)
    name = "policy/rollout_train_logprobs"
    out = {f"{name}_num_invalid": float((~finite).sum())}
    gap = gap[finite]
    if gap.numel():
        out |= {
            f"{name}_abs_diff_mean": float(gap.mean()),
            f"{name}_abs_diff_std": float(gap.std(unbiased=False)),
            f"{name}_abs_diff_max": float(gap.max()),
            f"{name}_abs_diff_min": float(gap.min()),
        }
    return out
