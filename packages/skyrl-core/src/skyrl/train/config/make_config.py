"""A root configuration with some of its sections replaced by an extension's own; extensions compose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import Field, create_model

from skyrl.train.config.part import ConfigPart
from skyrl.train.config.root import SkyRLTrainConfig

# Where each argument of `make_config` goes: the path of its section below the root.
PLACES: dict[str, tuple[str, ...]] = {
    "algorithm_cls": ("trainer", "algorithm"),
    "trainer_cls": ("trainer",),
    "generator_cls": ("generator",),
    "environment_cls": ("environment",),
    "data_cls": ("data",),
}


def make_config(
    *,
    trainer_cls: type[ConfigPart] | None = None,
    generator_cls: type[ConfigPart] | None = None,
    algorithm_cls: type[ConfigPart] | None = None,
    environment_cls: type[ConfigPart] | None = None,
    data_cls: type[ConfigPart] | None = None,
    root_cls: type[SkyRLTrainConfig] = SkyRLTrainConfig,
) -> type[SkyRLTrainConfig]:
    """A subclass of `root_cls` with these sections. Each must be a subclass of the section that it replaces.

    `algorithm_cls` goes into `trainer_cls` where both are given.
    """
    given = {
        "trainer_cls": trainer_cls,
        "generator_cls": generator_cls,
        "environment_cls": environment_cls,
        "data_cls": data_cls,
    }
    sections = {PLACES[name][0]: cls for name, cls in given.items() if cls is not None}
    for name, cls in sections.items():
        _require_subclass(cls, root_cls.model_fields[name].annotation, f"{name}_cls")
    if algorithm_cls is not None:
        trainer: Any = sections.get("trainer", root_cls.model_fields["trainer"].annotation)
        _require_subclass(algorithm_cls, trainer.model_fields["algorithm"].annotation, "algorithm_cls")
        sections["trainer"] = _replace(trainer, (("algorithm", algorithm_cls),))
    return _replace(root_cls, tuple(sections.items())) if sections else root_cls


def combine_parts(*extensions: Mapping[str, type]) -> dict[str, type]:
    """One set of `make_config` arguments from several extensions' sets.

    Two classes for one section become one that has the keys of both. ValueError where they declare the same key
    differently.
    """
    combined: dict[str, type] = {}
    for parts in extensions:
        for name, cls in parts.items():
            combined[name] = _both(combined[name], cls) if name in combined else cls
    return combined


def parts_of(cls: type[SkyRLTrainConfig]) -> dict[str, type]:
    """The `make_config` arguments that give a configuration with the keys of `cls`, so that it composes with others."""
    plain = SkyRLTrainConfig.model_fields
    parts: dict[str, Any] = {}
    for name in ("trainer", "generator", "environment", "data"):
        part = cls.model_fields[name].annotation
        if part is not plain[name].annotation:
            parts[f"{name}_cls"] = part
    root: Any = cls
    while (made_by := vars(root).get("__made_by__")) is not None:
        root = made_by[1][0]
    return parts if root is SkyRLTrainConfig else {**parts, "root_cls": root}


@cache
def _both(first: Any, second: Any) -> Any:
    """One section class with the keys of two."""
    if issubclass(first, second):
        return first
    if issubclass(second, first):
        return second
    shared = next(base for base in first.__mro__ if issubclass(second, base) and issubclass(base, ConfigPart))
    fields: dict[str, Any] = {}
    for name in set(first.model_fields) & set(second.model_fields):
        by_first, by_second = _declaration(first, shared, name), _declaration(second, shared, name)
        if by_first is not None and by_second is not None and repr(by_first) != repr(by_second):
            raise ValueError(
                f"{first.__name__} and {second.__name__} both change the key {name!r} and cannot be combined: "
                f"make one a subclass of the other"
            )
        changed = by_first or by_second
        if changed is not None:
            fields[name] = (changed.annotation, changed)
    made = create_model(f"{first.__name__}With{second.__name__}", __base__=(first, second), **fields)
    made.__made_by__ = (_both, (first, second))
    return made


def _declaration(cls: Any, shared: Any, name: str) -> Any:
    """The field as `cls` declares it, None where it is the shared base's own."""
    field = cls.model_fields[name]
    inherited = shared.model_fields.get(name)
    return None if inherited is not None and repr(inherited) == repr(field) else field


@cache
def _replace(cls: Any, sections: tuple[tuple[str, Any], ...]) -> Any:
    """A subclass of `cls` whose sections are built by these classes."""
    fields: dict[str, Any] = {
        name: (part, Field(default_factory=part, description=cls.model_fields[name].description))
        for name, part in sections
    }
    suffix = "".join(part.__name__.removesuffix("Config") for _, part in sections)
    made = create_model(f"{suffix}{cls.__name__}", __base__=cls, **fields)
    made.__made_by__ = (_replace, (cls, sections))
    return made


def _require_subclass(cls: type, base: Any, argument: str) -> None:
    if not issubclass(cls, base):
        raise ValueError(f"{argument} must be a subclass of {base.__name__}, got {cls.__name__}")
