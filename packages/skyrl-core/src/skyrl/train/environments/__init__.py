"""What scores a trajectory: environments by name, and the threads that they run in."""

from skyrl.train.environments.registry import aggregate_metrics, import_plugins, known, make, register, require
from skyrl.train.environments.stepping import EnvironmentFailed, EnvironmentThreads, Episode

__all__ = [
    "EnvironmentFailed",
    "EnvironmentThreads",
    "Episode",
    "aggregate_metrics",
    "import_plugins",
    "known",
    "make",
    "register",
    "require",
]
