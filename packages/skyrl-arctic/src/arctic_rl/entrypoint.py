"""How an Arctic run is started: the backend's plugin, its own door `main`, and the script `train`.

train                              the embedded run: tiny model, sums, own server
train trainer.seed=2               the same with one key changed
train <a recipe's overrides>       that recipe, on this backend
python -m arctic_rl.entrypoint <overrides>
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from skyrl.train import backends
from skyrl.train.backends import BackendPlugin
from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import ConfigError
from skyrl.train.entrypoints import main_base
from skyrl.train.entrypoints.public_names import with_selected

from arctic_rl.config import CONFIG_PARTS
from arctic_rl.key_report import report
from arctic_rl.memory import state_memory

NAME = "arctic_rl"
# Where one of these is set, a run says itself what it trains on what.
OWN_RUN = ("trainer.policy.model.path", "data.train_data")


def worker_environ(cfg: Any) -> dict[str, str]:
    """What a worker process needs in its environment before it starts, besides the driver's ARCTIC_* variables."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if cfg.trainer.arctic_rl.determinism_full else {}


PLUGIN = BackendPlugin(
    name=NAME,
    policy_factory="arctic_rl.policy.factory:build",
    config_parts=CONFIG_PARTS,
    trainer_cls="arctic_rl.trainer:ArcticPPOTrainer",
    generator_cls="arctic_rl.generator:ArcticGenerator",
    environ_prefixes=("ARCTIC_",),
    worker_environ=worker_environ,
    report=report,
    state_memory=state_memory,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the overrides (unset: the process's own arguments) on this backend."""
    main_base.main(argv, before=on_this_backend)


def train(argv: Sequence[str] | None = None) -> None:
    """Like `main`, over the embedded run wherever the overrides name neither a model nor data."""
    main_base.main(argv, before=lambda given: on_this_backend(over_embedded_run(given)))


def on_this_backend(argv: Sequence[str]) -> list[str]:
    """The arguments with `trainer.backend=arctic_rl`. ConfigError where they name another backend."""
    overrides = parse(with_selected(argv)[0])  # a public entrypoint's name chooses no backend
    asked = any(overrides.get(key) is not None for key in (backends.BACKEND, backends.OLDER_SPELLING))
    if asked and (named := backends.backend_name_from_argv(argv)) != NAME:
        instead = "leave the key out, or use python -m skyrl.train.entrypoints.main_base"
        raise ConfigError([f"{backends.BACKEND}={named}: this door runs {NAME} only; {instead}"])
    return [*argv, f"{backends.BACKEND}={NAME}"]


def over_embedded_run(argv: Sequence[str]) -> list[str]:
    """The arguments laid over the embedded run's file, unless they name their own model or data."""
    overrides = parse(argv)
    if any(overrides.get(key) is not None for key in OWN_RUN):
        return list(argv)
    return [f"@{files('skyrl.train.quickstart') / 'embedded.yaml'}", *argv]


if __name__ == "__main__":
    main()
