"""Questions to a configuration class: which keys it has, of which type, and whether a value fits one."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from skyrl.train.config.overrides import Path_
from skyrl.train.config.part import ConfigPart


def section_class(field: FieldInfo) -> type[ConfigPart] | None:
    """The class of a nested section (also an optional one), None for a leaf."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, ConfigPart)), None)


def leaves(cls: type[ConfigPart], prefix: Path_ = ()) -> Iterator[tuple[Path_, FieldInfo]]:
    """Every leaf key with its declaration, in order."""
    for name, field in cls.model_fields.items():
        nested = section_class(field)
        if nested is None:
            yield (*prefix, name), field
        else:
            yield from leaves(nested, (*prefix, name))


@cache
def key_names(cls: type[ConfigPart]) -> tuple[str, ...]:
    """Every leaf key as users write it."""
    return tuple(".".join(path) for path, _ in leaves(cls))


def find(cls: type[ConfigPart], path: Path_) -> tuple[Path_, FieldInfo] | None:
    """The longest part of `path` that names a key or section, with its declaration; None where the path leads nowhere.

    A path into a free mapping (`engine_init_kwargs.max_model_len`) finds the mapping.
    """
    field: FieldInfo | None = None
    current: type[ConfigPart] | None = cls
    for depth, name in enumerate(path):
        if current is None or name not in current.model_fields:
            if current is None and field is not None and takes(field, {}):
                return path[:depth], field
            return None
        field = current.model_fields[name]
        current = section_class(field)
    assert field is not None
    return path, field


def takes(field: FieldInfo, value: Any) -> bool:
    """Whether a leaf accepts this value as it is."""
    try:
        _adapter_of(field).validate_python(value)
    except ValidationError:
        return False
    return True


def fitted(field: FieldInfo, value: Any, text: str | None) -> Any:
    """The value in the form that the leaf wants, where no meaning is lost.

    `run_name=123` is the text that was written, `max_training_steps=1e3` is the whole number 1000.
    """
    if takes(field, value):
        return value
    if isinstance(value, float) and value.is_integer() and takes(field, int(value)):
        return int(value)
    if text is not None and not isinstance(value, list | dict) and value is not None and takes(field, text):
        return text
    return value


def declared_defaults(cls: type[ConfigPart]) -> dict[str, Any]:
    """The tree of defaults as declared, before anything is derived."""
    out: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        nested = section_class(field)
        default = field.get_default(call_default_factory=True)
        if nested is not None:
            out[name] = None if field.default_factory is None else declared_defaults(nested)
        else:
            out[name] = list(default) if isinstance(default, tuple) else default
    return out


def _adapter_of(field: FieldInfo) -> TypeAdapter[Any]:
    return _adapter(id(field), field)


_ADAPTERS: dict[int, tuple[FieldInfo, TypeAdapter[Any]]] = {}


def _adapter(identity: int, field: FieldInfo) -> TypeAdapter[Any]:
    if identity not in _ADAPTERS:
        annotation: Any = field.annotation
        if field.metadata:
            annotation = Annotated[(annotation, *field.metadata)]
        _ADAPTERS[identity] = (field, TypeAdapter(annotation, config=ConfigDict(strict=True)))
    return _ADAPTERS[identity][1]
