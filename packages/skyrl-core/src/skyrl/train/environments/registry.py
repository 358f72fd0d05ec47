"""Which environment a name means: those of `skyrl_gym`, ours, and whatever a user's module registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skyrl_gym.envs import registration
from skyrl_gym.envs.base_text_env import BaseTextEnv

from skyrl.train.config.problems import listed

# Name -> entry point of the environments that this package adds.
OWN_ENVIRONMENTS = {"arithmetic": "skyrl.train.environments.arithmetic:ArithmeticEnv"}

EntryPoint = str | Callable[..., BaseTextEnv]


def register(name: str, entry_point: EntryPoint, kwargs: Mapping[str, Any] | None = None) -> None:
    """Adds an environment under `name`, as a class or "module:Class"; the same registration twice is harmless.

    Raises ValueError where the name already means another environment.
    """
    present = registration.registry.get(name)
    if present is None:
        registration.register(id=name, entry_point=entry_point, kwargs=dict(kwargs or {}))
    elif present.entry_point != entry_point or present.kwargs != dict(kwargs or {}):
        raise ValueError(f"environment {name!r} is already registered as {present.entry_point!r}: pick another name")


def use_reward(path: str) -> str:
    """The environment that scores by the function "module:name", registered under that very text."""
    register(path, "skyrl.train.environments.own_reward:OwnRewardEnv", {"path": path})
    return path


def known() -> list[str]:
    """Every name that `make` accepts, sorted."""
    _register_own()
    return sorted(registration.registry)


def require(names: Iterable[str]) -> None:
    """Raises ValueError, with the known names and the nearest one, for a name that no environment has."""
    choices = known()
    for name in names:
        if name not in choices:
            raise ValueError(
                f"unknown environment {name!r}: {listed(name, choices)}; one of your own is registered by a module "
                "named in environment.plugins"
            )


def make(name: str, *, env_config: Any, extras: Mapping[str, Any]) -> BaseTextEnv:
    """A new environment for one trajectory; `extras` are the row's other columns, with `max_turns`.

    Raises ValueError for an unknown name, and whatever the environment raises about its extras.
    """
    require([name])
    return registration.make(name, env_config=env_config, extras=dict(extras))


def aggregate_metrics(name: str, per_episode: list[dict[str, Any]]) -> dict[str, float]:
    """The environment's own summary of its episodes' metrics; non-numbers are left out."""
    require([name])
    entry_point = registration.registry[name].entry_point
    creator = entry_point if callable(entry_point) else registration.load_env_creator(entry_point)
    aggregate = getattr(creator, "aggregate_metrics", BaseTextEnv.aggregate_metrics)
    return {key: float(v) for key, v in aggregate(per_episode).items() if isinstance(v, int | float)}


def _register_own() -> None:
    for name, entry_point in OWN_ENVIRONMENTS.items():
        register(name, entry_point)
