"""Which command serves `generator.inference_engine.backend=NAME`: the servers table, or the user's own command."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from skyrl.train.config.problems import listed

FILE_VARIABLE = "SKYRL_SERVERS_FILE"
FORMS = """\
name a server in one of these ways:
  in the table     generator.inference_engine.backend=NAME, with [tool.skyrl.servers.NAME] in the workspace's
                   pyproject.toml, or [servers.NAME] in the file that $SKYRL_SERVERS_FILE names:
                     command = ["my-server", "--model", "{model}", "--listen", "{listen}"]
  by its command   generator.inference_engine.server_command='my-server --model {model} --listen {listen}'
  by its address   generator.inference_engine.external_server_urls=['grpc://host:50051']"""

# A server of this very package, which needs no table; an entry of that name in a table comes before it.
BUILT_IN: dict[str, dict[str, Any]] = {
    "transformers": {
        "command": ["skyrl-serve", "--model", "{model}", "--listen", "{listen}", "--dtype", "{dtype}"],
        "options": {
            "max_num_seqs": "--max-num-seqs",
            "max_num_batched_tokens": "--max-num-batched-tokens",
            "gpu_memory_utilization": "--gpu-memory-utilization",
            "enable_prefix_caching": "--enable-prefix-caching",
            "engine_init_kwargs": "--engine-arg",
            "weight_sync_backend": {"delta": "--delta"},
        },
        "lora": {},
    },
}


@dataclass(frozen=True)
class ServerEntry:
    """How one kind of server is started.

    package: workspace member whose environment holds the command; None means the trainer's own environment. extras:
    device -> extra of the package. options: key under generator.inference_engine -> flag, or value -> flag. lora: key
    under trainer.policy.model.lora -> flag, for a run that trains an adapter; None where the server takes none.
    download_gb: device -> size.
    """

    name: str
    command: tuple[str, ...]
    root: Path | None = None
    package: str | None = None
    extras: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    lora: Mapping[str, str] | None = None
    download_gb: Mapping[str, float] = field(default_factory=dict)


def find(engine: Any) -> ServerEntry:
    """The entry that the configuration (`cfg.generator.inference_engine`) asks for.

    ValueError for an unknown name shows the known ones and the three ways to name a server.
    """
    if engine.server_command:
        return ServerEntry("server_command", _words(engine.server_command))
    table, root, where = _table()
    entries = BUILT_IN | table
    if engine.backend not in entries:
        known = f"{where or 'no servers table here: this package'} has {', '.join(sorted(entries))}"
        hint = listed(engine.backend, entries).partition("; ")[2]
        raise ValueError(
            f"generator.inference_engine.backend={engine.backend}: no such server; {known}"
            f"{'; ' + hint if hint else ''}\n{FORMS}"
        )
    return _entry(engine.backend, entries[engine.backend], root, where)


def with_adapters() -> list[str]:
    """The names of the servers that take low-rank adapters."""
    return sorted(name for name, raw in (BUILT_IN | _table()[0]).items() if "lora" in raw)


def _words(command: str | Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        raise ValueError(f"generator.inference_engine.server_command={command}: {error}") from error


@cache
def workspace_root() -> Path | None:
    """The nearest folder, above this file or above the current one, whose pyproject.toml has a servers table."""
    for start in (Path(__file__).resolve().parent, Path.cwd()):
        for folder in (start, *start.parents):
            if _servers_of(folder / "pyproject.toml"):
                return folder
    return None


def _table() -> tuple[dict[str, Any], Path | None, str]:
    """(entries, workspace root, where they stand). The file of the environment variable comes before the workspace."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ValueError(f"${FILE_VARIABLE}={named}: no such file")
        entries = _servers_of(path)
        if not entries:
            raise ValueError(f"${FILE_VARIABLE}={named}: no [servers.NAME] in it\n{FORMS}")
        return entries, workspace_root(), str(path)
    root = workspace_root()
    if root is None:
        return {}, None, ""
    return _servers_of(root / "pyproject.toml"), root, str(root / "pyproject.toml")


def _servers_of(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    return content.get("servers") or content.get("tool", {}).get("skyrl", {}).get("servers", {})


def _entry(name: str, raw: Mapping[str, Any], root: Path | None, where: str) -> ServerEntry:
    known = ("command", "package", "extras", "options", "lora", "download_gb")
    for key in raw:
        if key not in known:
            raise ValueError(f"{where}: servers.{name}.{key}: unknown key; {listed(key, known)}")
    command = raw.get("command")
    if not isinstance(command, list) or not command:
        raise ValueError(f"{where}: servers.{name}.command: expected a list of texts\n{FORMS}")
    if raw.get("package") and root is None:
        raise ValueError(
            f"{where}: servers.{name}.package names a workspace member, and there is no workspace here: leave it out "
            f"and write the full path of an installed command"
        )
    return ServerEntry(
        name=name,
        command=tuple(map(str, command)),
        root=root,
        package=raw.get("package"),
        extras=raw.get("extras", {}),
        options=raw.get("options", {}),
        lora=raw.get("lora"),
        download_gb=raw.get("download_gb", {}),
    )
