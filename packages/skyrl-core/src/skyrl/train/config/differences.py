"""Where a default differs on purpose from the public one: key, theirs, ours, reason. Made from the declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.train.config import schema
from skyrl.train.config.part import ConfigPart
from skyrl.train.config.root import SkyRLTrainConfig


@dataclass(frozen=True)
class Difference:
    """One key whose default is not the public one."""

    key: str
    theirs: Any
    ours: Any
    reason: str


def differences(cls: type[ConfigPart] = SkyRLTrainConfig) -> list[Difference]:
    """One row per key whose declaration names another public default, in the order of the tree."""
    out = []
    for path, field in schema.leaves(cls):
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "theirs" in extra:
            ours = extra.get("ours") or field.get_default(call_default_factory=True)
            out.append(Difference(".".join(path), extra["theirs"], ours, str(extra["reason"])))
    return out


def as_markdown(cls: type[ConfigPart] = SkyRLTrainConfig) -> str:
    """The table for a README."""
    rows = [f"| `{d.key}` | {_shown(d.theirs)} | {_shown(d.ours)} | {d.reason} |" for d in differences(cls)]
    return "\n".join(["| key | theirs | ours | reason |", "|---|---|---|---|", *rows])


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
