"""What a batch of rollouts looked like: lengths, turns, times, versions and what the environments report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl.train import environments
from skyrl.train.generator.trajectory import Trajectory

TIMES = ("completion", "llm", "env", "other")


def generation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`generate/*` and `environment/*` over at least one trajectory.

    num_tokens counts response tokens, assistant_tokens those that the policy sampled; trajectory_time_* are seconds, as
    is group_completion_time_*, the time until all samples of a prompt had ended.
    invalid_logprobs counts sampled tokens whose logprob the server could not say.
    """
    lengths = np.array([len(t.response_token_ids) for t in trajectories], dtype=np.float64)
    sampled = np.array([sum(t.turn_num_tokens) for t in trajectories], dtype=np.float64)
    turns = np.array([n for t in trajectories for n in t.turn_num_tokens], dtype=np.float64)
    rewarded = np.array([t.total_reward != 0 for t in trajectories])
    return {
        **{f"generate/{how}_num_tokens": v for how, v in _spread(lengths).items()},
        **{f"generate/{how}_assistant_tokens": v for how, v in _spread(sampled).items()},
        "generate/avg_tokens_non_zero_rewards": _mean(lengths[rewarded]),
        "generate/avg_tokens_zero_rewards": _mean(lengths[~rewarded]),
        "generate/tokens_per_turn_mean": _mean(turns),
        "generate/tokens_per_turn_std": float(turns.std()) if turns.size else 0.0,
        "generate/tokens_per_turn_max": float(turns.max(initial=0.0)),
        "generate/batch_num_seq": float(len(trajectories)),
        "generate/stop_ratio": _mean(np.array([t.stop_reason == "stop" for t in trajectories], dtype=np.float64)),
        "generate/invalid_logprobs": float(sum(np.isnan(t.rollout_logprobs).sum() for t in trajectories)),
        **_versions(trajectories),
        **_times(trajectories),
        **_group_times(trajectories),
        **_environments(trajectories),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "avg": float(values.mean()),
        "std": float(values.std()),
    }


def _versions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    sampled = np.concatenate([t.weight_versions[t.weight_versions >= 0] for t in trajectories])
    return {"generate/weight_version_min": float(sampled.min()), "generate/weight_version_max": float(sampled.max())}


def _times(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    out: dict[str, float] = {}
    times = [t.seconds for t in trajectories if t.seconds]
    for name in TIMES if times else ():
        if name == "other":
            seconds = np.array([max(s["completion"] - s["llm"] - s["env"], 0.0) for s in times])
        else:
            seconds = np.array([s[name] for s in times])
        out |= _long_tail(f"generate/trajectory_time_{name}", seconds)
    return out


def _group_times(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    slowest: dict[str, float] = defaultdict(float)
    for t in trajectories:
        if t.seconds:
            slowest[t.id.uid] = max(slowest[t.id.uid], t.seconds["completion"])
    return _long_tail("generate/group_completion_time", np.array(list(slowest.values()))) if slowest else {}


def _long_tail(name: str, seconds: np.ndarray) -> dict[str, float]:
    return {
        f"{name}_mean": float(seconds.mean()),
        f"{name}_p90": float(np.percentile(seconds, 90)),
        f"{name}_max": float(seconds.max()),
    }


def _environments(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    by_env: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for t in trajectories:
        if t.env_metrics:
            by_env[t.env_class].append(t.env_metrics)
    out: dict[str, float] = {}
    for name, episodes in by_env.items():
        prefix = "environment" if len(by_env) == 1 else f"environment/{name}"
        out |= {f"{prefix}/{key}": value for key, value in environments.aggregate_metrics(name, episodes).items()}
    return out
