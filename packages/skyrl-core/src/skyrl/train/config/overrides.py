"""What a user wrote: `key=value` arguments and `@run.yaml` files, in order, the later winning.

Only the grammar is checked here; which keys exist is asked in `build.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl.train.config.problems import ConfigError

Path_ = tuple[str, ...]
KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*$")


@dataclass(frozen=True)
class Written:
    """One value as it was written. `text` is the raw right-hand side of an argument, None for a value in a file."""

    value: Any
    text: str | None
    source: str


@dataclass
class Overrides:
    """Leaf values by path, in the order in which they were first written."""

    leaves: dict[Path_, Written] = field(default_factory=dict)

    def set(self, path: Path_, written: Written) -> None:
        """A mapping sets its leaves; any other value replaces what stood at the path or below it."""
        if isinstance(written.value, dict) and written.value:
            for name, value in written.value.items():
                self.set(path + tuple(str(name).split(".")), Written(value, None, written.source))
            return
        below = [p for p in self.leaves if p[: len(path)] == path]
        if written.value == {} and below:
            return
        for p in below:
            del self.leaves[p]
        for length in range(1, len(path)):
            self.leaves.pop(path[:length], None)
        self.leaves[path] = written

    def get(self, dotted: str) -> Any:
        """The value at a key, None where it is not set."""
        written = self.leaves.get(tuple(dotted.split(".")))
        return written.value if written else None

    def below(self, path: Path_) -> list[Path_]:
        return [p for p in self.leaves if p[: len(path)] == path]


def parse(argv: Sequence[str]) -> Overrides:
    """Reads arguments and files. ConfigError lists every argument that is not of the grammar, and how to write it."""
    overrides, problems = Overrides(), []
    for argument in argv:
        try:
            for path, written in _read(argument):
                overrides.set(path, written)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return overrides


def _read(argument: str) -> Iterator[tuple[Path_, Written]]:
    if argument.startswith("@"):
        yield from _read_file(Path(argument[1:]).expanduser())
        return
    _refuse_foreign_forms(argument)
    name, equals, text = argument.partition("=")
    if not equals:
        raise ValueError(f"{argument}: no value; write {argument}=VALUE (null for none), without spaces around '='")
    yield tuple(name.split(".")), Written(_value(name, text), text, "the command line")


def _refuse_foreign_forms(argument: str) -> None:
    name, _, text = argument.partition("=")
    if argument.startswith("+"):
        key = name.lstrip("+")
        raise ValueError(
            f"{argument}: '+' for new keys is not supported; write {key}={text} if the key exists, else give the "
            f"section a subclass that declares it (skyrl.train.config.make_config)"
        )
    if argument.startswith("~"):
        raise ValueError(f"{argument}: keys cannot be deleted; write {name[1:]}=null to unset one")
    if argument.startswith("-"):
        key = name.lstrip("-").replace("-", "_")
        raise ValueError(f"{argument}: flags are not supported; write {key}={text or 'VALUE'} (see --help)")
    if not KEY.match(name):
        raise ValueError(f"{argument}: {name!r} is not a key; write section.key=value, or @FILE.yaml for a file")


def _value(name: str, text: str) -> Any:
    """The right-hand side read as YAML: numbers, true/false, null, [lists] and {mappings}; anything else is text."""
    try:
        container = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        if text[:1] in "[{":
            raise ValueError(
                f"{name}={text}: not closed or not well-formed; quote it for the shell: '{name}=...'"
            ) from error
        return text
    assert isinstance(container, dict)
    value = container["value"]
    return text if isinstance(value, dict) and not text.lstrip().startswith("{") else value


def _read_file(path: Path) -> Iterator[tuple[Path_, Written]]:
    if not path.is_file():
        raise ValueError(f"@{path}: no such file")
    try:
        loaded = OmegaConf.load(path)
        content = OmegaConf.to_container(loaded, resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"@{path}: not a YAML file: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"@{path}: expected keys and values, found a {type(content).__name__}")
    for name, value in content.items():
        if not KEY.match(str(name)):
            raise ValueError(f"@{path}: {name!r} is not a key; write keys and values, as in 'trainer: {{epochs: 3}}'")
        value = _beside(value, path.absolute().parent)
        yield tuple(str(name).split(".")), Written(value, None, f"@{path}")


def _reason(error: Exception) -> str:
    """'line 3: what is wrong there', as far as the error knows."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0]


def _beside(value: Any, folder: Path) -> Any:
    """`value` with ${here} replaced by the folder of its file, so that a file can name what lies beside it."""
    if isinstance(value, dict):
        return {name: _beside(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_beside(item, folder) for item in value]
    return value.replace("${here}", str(folder)) if isinstance(value, str) else value
