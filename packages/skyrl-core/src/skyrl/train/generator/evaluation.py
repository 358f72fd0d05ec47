"""How good a policy is on a data set: scores per data source, from finished trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from skyrl.train.generator.trajectory import Trajectory


def evaluation_metrics(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """`eval/{source}/{avg_score, pass_at_n, mean_positive_reward}` per data source and over `all`.

    avg_score is the mean total reward of a trajectory; pass_at_n the share of prompts of which any of the n samples got
    a reward above 0 on its last token (so a multi-turn episode passes by how it ended); mean_positive_reward the mean
    of total rewards with those below 0 taken as 0.
    """
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        by_source[source_name(t.data_source)].append(t)
    groups = {**by_source, "all": list(trajectories)} if trajectories else {}
    return {f"eval/{source}/{name}": v for source, g in groups.items() for name, v in scores(g, n_samples).items()}


def scores(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """The three scores of at least one trajectory, under their short names."""
    rewards = [t.total_reward for t in trajectories]
    passed: dict[str, bool] = defaultdict(bool)
    for t in trajectories:
        passed[t.id.uid] |= bool(t.rewards[-1] > 0)
    return {
        "avg_score": sum(rewards) / len(rewards),
        f"pass_at_{n_samples}": sum(passed.values()) / len(passed),
        "mean_positive_reward": sum(max(r, 0.0) for r in rewards) / len(rewards),
    }


def source_name(data_source: str) -> str:
    """A data source as part of a metric's or a file's name, where "/" divides; an empty one is `unknown`."""
    return data_source.replace("/", "_") or "unknown"
