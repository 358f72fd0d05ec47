"""What every section of the configuration is made of: a frozen pydantic model that refuses unknown keys.

`key(...)` declares one key. Where a default differs on purpose from the public one, the declaration says so, and
`differences.py` makes the table from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NOT_DIFFERENT = object()


class ConfigPart(BaseModel):
    """A section. Values are checked strictly: an integer key takes no `true`, a text key no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    # How `make_config` made this class: (function, arguments). A class of a module has none.
    __made_by__: ClassVar[tuple[Callable[..., type], tuple[Any, ...]] | None] = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (_recipe(type(self)), self.__getstate__())


def _recipe(value: Any) -> Any:
    """`value` with every made class in it replaced by how to make it, so that worker processes can."""
    if isinstance(value, tuple):
        return tuple(_recipe(item) for item in value)
    made_by = vars(value).get("__made_by__") if isinstance(value, type) else None
    return {"make": made_by[0], "of": _recipe(made_by[1])} if made_by else value


def _make(recipe: Any) -> Any:
    if isinstance(recipe, tuple):
        return tuple(_make(item) for item in recipe)
    return recipe["make"](*_make(recipe["of"])) if isinstance(recipe, dict) else recipe


def _restore(recipe: Any, state: dict[Any, Any]) -> ConfigPart:
    cls = _make(recipe)
    part = cls.__new__(cls)
    part.__setstate__(state)
    return part


def key(
    default: Any,
    doc: str,
    *,
    theirs: Any = NOT_DIFFERENT,
    ours: str = "",
    reason: str = "",
    **constraints: Any,
) -> Any:
    """One key: its default, what it does and, where the public default is another one (`theirs`), the reason for ours.

    `ours` says in words what the default amounts to. `constraints` are pydantic's own (`ge`, `gt`, `le`, ...).
    """
    extra: dict[str, Any] = {}
    if theirs is not NOT_DIFFERENT:
        assert reason, "a default that differs needs a reason"
        extra = {"theirs": theirs, "ours": ours, "reason": reason}
    return Field(default, description=doc, json_schema_extra=extra, **constraints)


def section(cls: type[ConfigPart], doc: str = "") -> Any:
    """A nested section, built with its own defaults."""
    return Field(default_factory=cls, description=doc)


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _listed(value)


def _as_pair(value: Any) -> Any:
    return tuple(float(item) if type(item) is int else item for item in value) if isinstance(value, list) else value


# A list of texts; one plain text stands for a list of one.
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
# One text that is no list of one, or a list.
TextOrTexts = Annotated[str | tuple[str, ...], BeforeValidator(_listed)]
# Two numbers, as in [0.9, 0.999].
FloatPair = Annotated[tuple[float, float], BeforeValidator(_as_pair)]
