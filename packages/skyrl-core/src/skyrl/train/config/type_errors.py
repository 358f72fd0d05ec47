"""A value of the wrong type, told as: key, value, what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skyrl.train.config import schema
from skyrl.train.config.overrides import Path_, Written
from skyrl.train.config.part import ConfigPart
from skyrl.train.config.problems import did_you_mean

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list, as in ['a','b']",
    "list_type": "a list, as in ['a','b']",
    "dict_type": "a mapping, as in {name: value}",
    "none_required": "null",
    "finite_number": "a finite number",
    "missing": "two numbers, as in [0.9,0.999]",
    "too_long": "two numbers, as in [0.9,0.999]",
}
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def describe(cls: type[ConfigPart], error: ValidationError, placed: Mapping[Path_, Written]) -> list[str]:
    """One line per key: `trainer.epochs=abc: expected a whole number`."""
    expected: dict[Path_, list[str]] = {}
    values: dict[Path_, Any] = {}
    for detail in error.errors(include_url=False):
        path = _key_of(cls, detail["loc"])
        values.setdefault(path, detail["input"])
        wanted = _expected(cls, path, detail)
        if wanted not in expected.setdefault(path, []):
            expected[path].append(wanted)
    return [_line(path, _joined(wanted), placed, values[path]) for path, wanted in expected.items()]


def _joined(wanted: list[str]) -> str:
    """'expected true or false, or a whole number'."""
    return ", or ".join([wanted[0], *(text.removeprefix("expected ") for text in wanted[1:])])


def _line(path: Path_, wanted: str, placed: Mapping[Path_, Written], value: Any) -> str:
    written = placed.get(path)
    dotted = ".".join(path)
    if written is None:
        return f"{dotted}={value}: {wanted}" if dotted else wanted
    where = "" if written.text is not None else f" (in {written.source})"
    return f"{dotted}={written.text if written.text is not None else written.value}: {wanted}{where}"


def _key_of(cls: type[ConfigPart], loc: tuple[int | str, ...]) -> Path_:
    """The key that an error's location lies in: what follows a leaf (list index, branch of a union) is left out."""
    path: list[str] = []
    current: type[ConfigPart] | None = cls
    for item in loc:
        if current is None:
            break
        if item not in current.model_fields:
            if isinstance(item, str) and item == current.__name__:
                continue  # the branch of an optional section
            path.append(str(item))
            break
        path.append(str(item))
        current = schema.section_class(current.model_fields[str(item)])
    return tuple(path)


def _expected(cls: type[ConfigPart], path: Path_, detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in BOUNDS:
        word, name = BOUNDS[kind]
        return f"expected {word} {context[name]}"
    if kind == "literal_error":
        return f"expected one of {context['expected'].replace(' or ', ', ')}{_near_literal(detail, context)}"
    if kind in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"expected a section; set its keys one by one, as in {'.'.join(path)}.{_first_key(cls, path)}=..."
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean('.'.join(path), schema.key_names(cls))}"
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    return f"expected {EXPECTED[kind]}" if kind in EXPECTED else detail["msg"]


def _near_literal(detail: ErrorDetails, context: Mapping[str, Any]) -> str:
    names = [name.strip("' ") for name in context["expected"].replace(" or ", ",").split(",")]
    return did_you_mean(str(detail["input"]), names)


def _first_key(cls: type[ConfigPart], path: Path_) -> str:
    found = schema.find(cls, path)
    nested = schema.section_class(found[1]) if found else None
    return next(iter(nested.model_fields)) if nested else "KEY"
