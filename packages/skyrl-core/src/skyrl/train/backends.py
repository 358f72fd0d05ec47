"""Which trainer backend a name means, and how an entrypoint composes its parts with it.

`trainer.backend=NAME` (default fsdp) is looked up among the `skyrl.backends` entry points, else as module
`NAME.entrypoint`. Core knows no integration by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KeyReport:
    """What a backend does with each key that the user set: honoured, mapped (key -> what it becomes), unused (key ->
    why), refused (key -> what to do)."""

    honoured: tuple[str, ...] = ()
    mapped: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendPlugin:
    """What an integration supplies. Strings of the form "module:attribute" are imported where they are needed.

    config_parts: classes for `make_config` ({"trainer_cls": ...}). policy_factory: (cfg, place, role, *, total_steps) ->
    PolicyBackend, called inside the worker; total_steps counts the optimizer steps of the whole run, for the schedule.
    worker_environ: (cfg) -> variables that every worker process gets besides the driver's own variables with
    `environ_prefixes`. report: (cfg, user_keys) -> KeyReport.
    """

    name: str
    policy_factory: str
    config_parts: Mapping[str, type] = field(default_factory=dict)
    trainer_cls: str = "skyrl.train.trainer:RayPPOTrainer"
    generator_cls: str = "skyrl.train.generator.env_generator:EnvGenerator"
    environ_prefixes: tuple[str, ...] = ()
    worker_environ: Callable[[Any], dict[str, str]] | None = None
    report: Callable[[Any, tuple[str, ...]], KeyReport] | None = None
