"""How a name in the config becomes a function: one table per kind, which users extend and errors list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from skyrl.train.config.problems import listed

F = TypeVar("F", bound=Callable[..., Any])

_TABLES: dict[str, Table[Any]] = {}


class Table(Mapping[str, F], Generic[F]):
    """Functions by name. `key` is the config key that holds the name; it stands in every error. `adapted` makes a
    user's function one of this table's, where it has another form."""

    def __init__(self, key: str, builtin: Mapping[str, F], adapted: Callable[[Any], F] | None = None) -> None:
        self.key, self._adapted = key, adapted
        self._functions: dict[str, F] = dict(builtin)
        self._added: dict[str, F] = {}
        _TABLES[key] = self

    def __getitem__(self, name: str) -> F:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def builtin(self) -> frozenset[str]:
        """The names that come with this package."""
        return frozenset(self._functions.keys() - self._added.keys())

    def pick(self, name: str) -> F:
        """The function called `name`. ValueError lists the known names and the nearest one."""
        if name in self._functions:
            return self._functions[name]
        raise ValueError(f"{self.key}={name}: {listed(name, self)}")

    def register(self, name: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Adds a user's function before the workers start, who then get it too, and returns it as it was given. Without
        one it is the decorator that does so. ValueError for a name that is taken."""
        if function is None:
            return partial(self.register, name)
        ours: Any = function if self._adapted is None else self._adapted(function)
        if self._functions.get(name, ours) != ours:
            raise ValueError(f"{self.key}={name!r} is already taken: register the function under another name")
        self._functions[name] = self._added[name] = ours
        return function


def added_functions() -> dict[str, dict[str, Callable[..., Any]]]:
    """What users registered in this process, by config key: what a worker process must be given."""
    return {key: dict(table._added) for key, table in _TABLES.items() if table._added}


def install(added: Mapping[str, Mapping[str, Callable[..., Any]]]) -> None:
    """Registers in a worker process what `added_functions` returned in the driver."""
    for key, functions in added.items():
        for name, function in functions.items():
            _TABLES[key]._functions[name] = function
