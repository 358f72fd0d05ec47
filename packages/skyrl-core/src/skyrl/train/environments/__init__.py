"""What scores a trajectory: environments by name, and the threads that they run in."""

from skyrl.train.environments.registry import aggregate_metrics, known, make, register, require, use_reward
from skyrl.train.environments.stepping import EnvironmentFailed, EnvironmentsStuck, EnvironmentThreads, Episode
from skyrl.train.plugins import import_plugins

__all__ = [
    "EnvironmentFailed",
    "EnvironmentThreads",
    "EnvironmentsStuck",
    "Episode",
    "aggregate_metrics",
    "import_plugins",
    "known",
    "make",
    "register",
    "require",
    "use_reward",
]
