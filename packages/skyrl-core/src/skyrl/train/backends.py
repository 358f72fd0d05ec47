"""Which trainer backend a name means, and how an entrypoint composes its parts with it.

`trainer.backend=NAME` (default fsdp) is looked up among the `skyrl.backends` entry points, else as module
`NAME.entrypoint`. Core knows no integration by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from skyrl.train.config.make_config import combine_parts, make_config
from skyrl.train.config.overrides import Overrides, parse
from skyrl.train.config.problems import ConfigError, listed
from skyrl.train.config.root import SkyRLTrainConfig
from skyrl.train.entrypoints import public_names

GROUP = "skyrl.backends"
DEFAULT = "fsdp"
BACKEND, OLDER_SPELLING = "trainer.backend", "trainer.override_entrypoint"


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

    config_parts: classes for `make_config` ({"trainer_cls": ...}). policy_factory: (cfg, place, role, *, total_steps)
    -> PolicyBackend, called inside the worker; total_steps counts the optimizer steps of the whole run.
    worker_environ: (cfg) -> variables that every worker process gets besides the driver's own variables with
    `environ_prefixes`. report: (cfg, user_keys) -> KeyReport. state_memory: (cfg, role, ModelSize) -> bytes of weights,
    gradients and optimizer in one worker, for `--check`; unset: as the fsdp backend shards them.
    """

    name: str
    policy_factory: str
    config_parts: Mapping[str, type] = field(default_factory=dict)
    trainer_cls: str = "skyrl.train.trainer:RayPPOTrainer"
    generator_cls: str = "skyrl.train.generator.env_generator:EnvGenerator"
    environ_prefixes: tuple[str, ...] = ()
    worker_environ: Callable[[Any], dict[str, str]] | None = None
    report: Callable[[Any, tuple[str, ...]], KeyReport] | None = None
    state_memory: Callable[[Any, str, Any], dict[str, float]] | None = None


def installed() -> tuple[str, ...]:
    """The names of the backends that are installed here."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def backend_name_from_argv(argv: Sequence[str]) -> str:
    """The backend that the arguments (and their @files) choose, before any key is checked: its plugin may own keys.

    `trainer.override_entrypoint=integrations.NAME.entrypoint` is the older spelling of `trainer.backend=NAME`.
    """
    return _chosen(parse(public_names.with_selected(argv)[0]))


def load_plugin(name: str) -> BackendPlugin:
    """The plugin of an installed backend: its entry point, else `PLUGIN` of module `NAME.entrypoint`.

    ValueError lists the installed backends and the nearest, or says that the module has only `main()`.
    """
    found = _find(name)
    if isinstance(found, ModuleType):
        raise ValueError(
            f"{BACKEND}={name}: {found.__name__} has a main() but no PLUGIN: start it through an entrypoint"
        )
    return found


def resolve(
    argv: Sequence[str],
    parts: Mapping[str, type] | None = None,
    *,
    announce: Callable[[str], None] = print,
) -> tuple[SkyRLTrainConfig, BackendPlugin]:
    """The configuration and the backend that `argv` asks for: the one way in for every entrypoint.

    `parts` are the entrypoint's own sections (`make_config` arguments, also `root_cls`); they are combined with the
    backend's. What becomes of each key is announced. ConfigError lists everything that is wrong. A backend whose module
    has only `main()` is handed control: its main runs, then SystemExit.
    """
    from skyrl.train.config import key_report  # it needs KeyReport from here
    from skyrl.train.config.build import build
    from skyrl.train.config.validation import validate
    from skyrl.train.launch import table
    from skyrl.train.launch.device import device_of

    argv, selected = public_names.with_selected(argv)
    overrides = parse(argv)
    found = _find(_chosen(overrides))
    if isinstance(found, ModuleType):
        raise SystemExit(found.main() or 0)
    older = overrides.leaves.pop(tuple(OLDER_SPELLING.split(".")), None)
    if older is not None and older.value is not None:
        selected = {OLDER_SPELLING: f"the older spelling of {BACKEND}={found.name}"}
    built = build(make_config(**combine_parts(parts or {}, found.config_parts)), overrides, backends=installed())
    cfg = built.cfg.with_backend(found.name)
    validate(cfg)
    engine = cfg.generator.inference_engine
    keys = key_report.report(built, device_of(cfg), None if engine.external_server_urls else table.find(engine))
    if found.report is not None:
        keys = key_report.merged(keys, found.report(cfg, built.user_keys))
    if selected:
        keys = key_report.merged(keys, KeyReport(mapped=selected))
    if keys.refused:
        raise ConfigError([f"{key}: {what}" for key, what in keys.refused.items()])
    for line in key_report.lines(keys, built.at_default):
        announce(line)
    return cfg, found


def import_attribute(path: str) -> Any:
    """What "module:attribute" names. ValueError says which half is missing."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ValueError(f"{path}: module {module} has no {attribute}") from error


def _chosen(overrides: Overrides) -> str:
    named, older = overrides.get(BACKEND), overrides.get(OLDER_SPELLING)
    if older is None:
        return str(named if named is not None else DEFAULT)
    name = str(older).removeprefix("integrations.").removesuffix(".entrypoint")
    if named is not None and named != name:
        raise ConfigError([f"{BACKEND}={named} and {OLDER_SPELLING}={older} name two backends: give one of them"])
    return name


def _find(name: str) -> BackendPlugin | ModuleType:
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point.load()
    module = _module(f"{name}.entrypoint") if re.fullmatch(r"[A-Za-z_][\w.]*", name) else None
    if module is None:
        raise ConfigError([f"{BACKEND}={name}: no such backend is installed; {listed(name, installed())}"])
    if isinstance(plugin := getattr(module, "PLUGIN", None), BackendPlugin):
        return plugin
    if not callable(getattr(module, "main", None)):
        raise ConfigError([f"{BACKEND}={name}: {module.__name__} has neither PLUGIN (a BackendPlugin) nor main()"])
    return module


def _module(name: str) -> ModuleType | None:
    """The module, None where there is none of that name; an error inside it is the integration's and stays one."""
    try:
        if importlib.util.find_spec(name) is None:
            return None
    except ModuleNotFoundError:
        return None
    return importlib.import_module(name)
