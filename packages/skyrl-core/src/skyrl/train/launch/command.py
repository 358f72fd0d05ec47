"""The command line of one server: the table's command with its placeholders filled, and the configuration's options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl.train.launch.table import FORMS, ServerEntry

# Settings of GPUs, which a server on CPU does not get, and why.
ONLY_ON_GPUS = {
    "tensor_parallel_size": "a server without GPUs is one worker",
    "gpu_memory_utilization": "there is no GPU memory to share",
    "expert_parallel_size": "a server without GPUs is one worker",
    "distributed_executor_backend": "a server without GPUs is one worker",
}


def build(
    entry: ServerEntry,
    engine: Any,
    values: Mapping[str, str],
    *,
    device: str,
    binaries: Path | None,
    lora: Any | None = None,
) -> list[str]:
    """The arguments to execute; the command is looked up in the folder `binaries` first.

    `values` fills {model}, {listen}, {dtype}, {seed}. `lora` is the section of the adapter where one is trained: its
    server needs room for it. ValueError for another placeholder, and without {listen}.
    """
    if not any("{listen}" in part for part in entry.command):
        raise ValueError(f"the command of server {entry.name!r} does not say {{listen}}, where to listen\n{FORMS}")
    try:
        filled = [part.format_map(values) for part in entry.command]
    except (KeyError, ValueError, IndexError) as error:
        known = ", ".join(f"{{{name}}}" for name in values)
        raise ValueError(f"the command of server {entry.name!r}: {error} is no placeholder; known: {known}") from error
    if binaries is not None and (binaries / filled[0]).is_file():
        filled[0] = str(binaries / filled[0])
    return filled + list(_options(entry, engine, device)) + list(_adapter_options(entry, lora))


def _options(entry: ServerEntry, engine: Any, device: str) -> Iterator[str]:
    for name, flag in entry.options.items():
        if name not in type(engine).model_fields:
            raise ValueError(f"servers.{entry.name}.options.{name}: generator.inference_engine has no such key")
        if device == "cpu" and name in ONLY_ON_GPUS:
            continue
        yield from _option(flag, getattr(engine, name))


def _adapter_options(entry: ServerEntry, lora: Any | None) -> Iterator[str]:
    if lora is None or not lora.rank:
        return
    for name, flag in (entry.lora or {}).items():
        if name not in type(lora).model_fields:
            raise ValueError(f"servers.{entry.name}.lora.{name}: trainer.policy.model.lora has no such key")
        yield from _option(flag, getattr(lora, name))


def _option(flag: str | Mapping[str, str], value: Any) -> Iterator[str]:
    """A flag with {json} holds the value; a mapping gives one flag per item; a switch stands or does not. Flags by
    value (JSON, or a text as it stands; `*`: any other) stand for these values alone."""
    if value is None:
        return
    if isinstance(flag, Mapping):
        text = value if isinstance(value, str) else json.dumps(value)
        yield from flag.get(text, flag.get("*", "")).split()
        return
    if "{json}" in flag:
        yield from (part.replace("{json}", json.dumps(value)) for part in flag.split())
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (flag, f"{key}={json.dumps(item)}")
    elif isinstance(value, bool):
        if value:
            yield flag
    else:
        yield from (flag, str(value))
