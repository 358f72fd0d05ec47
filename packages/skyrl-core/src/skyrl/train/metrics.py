"""The numbers of one training step, under the names that dashboards of public recipes already use."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from skyrl_rollout.weights.publisher import PublishReport

from skyrl.train.generator.evaluation import scores
from skyrl.train.generator.trajectory import Trajectory
from skyrl.train.policy.batch import TrajectoryBatch


class StepTimers:
    """Seconds per phase of one step, reported as `timing/<phase>`; a phase entered twice adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}": seconds for name, seconds in self._seconds.items()}


def reward_metrics(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """`avg_raw_reward` is the mean over samples, `avg_pass_at_n` the share of prompts of which any sample got a reward
    above 0 on its last token."""
    row = scores(trajectories, n_samples)
    return {
        f"reward/avg_pass_at_{n_samples}": row[f"pass_at_{n_samples}"],
        "reward/avg_raw_reward": row["avg_score"],
        "reward/mean_positive_reward": row["mean_positive_reward"],
    }


def batch_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    """Rewards and advantages as the update sees them, and the KL to the reference (k1, over trained tokens)."""
    mask, advantages = batch.loss_mask_T, batch.advantages_T
    assert advantages is not None, "batch_metrics runs after the advantages are estimated"
    tokens = mask.sum().clamp(min=1)
    out = {
        "loss/avg_final_rewards": float(batch.rewards_T.sum() / max(batch.num_sequences, 1)),
        "loss/avg_raw_advantages": float((advantages * mask).sum() / tokens),
        "loss/avg_raw_advantages_abs": float((advantages.abs() * mask).sum() / tokens),
    }
    if batch.ref_logprobs_T is not None and batch.old_logprobs_T is not None:
        kl_T = (batch.old_logprobs_T - batch.ref_logprobs_T) * mask
        out["loss/avg_kl"] = float(kl_T.sum() / tokens)
        out["loss/avg_kl_max"] = float(kl_T.max()) if kl_T.numel() else 0.0
    return out


def publish_metrics(report: PublishReport) -> dict[str, float]:
    """Of one publish: bytes, seconds per phase, and the longest time that a replica produced no token."""
    phases = {f"publish/{phase}_s": seconds for phase, seconds in report.seconds.items()}
    return {"publish/nbytes": float(report.nbytes), "publish/stall_s": report.stall_s, **phases}


def mean_over_minibatches(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combines the metrics of several optimizer steps: `_max` by max, `_min` by min, counts (`num_`) by sum, the rest
    by mean."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(k for row in rows for k in row):
        values = [row[name] for row in rows if name in row]
        leaf = name.rsplit("/", 1)[-1]
        if leaf.endswith("_max"):
            out[name] = max(values)
        elif leaf.endswith("_min"):
            out[name] = min(values)
        elif leaf.startswith("num_"):
            out[name] = sum(values)
        else:
            out[name] = sum(values) / len(values)
    return out


def tokens_per_second(batch: TrajectoryBatch, seconds: float, workers: int) -> float:
    """All tokens of the batch, prompt and response, per second of the step and per policy worker."""
    return int(torch.sum(batch.seq_lens_S)) / max(seconds, 1e-9) / workers
