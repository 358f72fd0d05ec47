"""Whether every message that docs/troubleshooting.md quotes is one that the sources make."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2]
PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
ENTRIES = re.findall(r"^### `(.*)`$", PAGE.read_text(), flags=re.MULTILINE)


@cache
def texts() -> list[str]:
    """Every text of the sources, its inserted values as …"""
    found = []
    for path in PACKAGES.glob("*/src/**/*.py"):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docs:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return found


@pytest.mark.parametrize("quoted", ENTRIES)
def test_a_quoted_message_is_made_by_the_sources(quoted: str) -> None:
    assert [text for text in texts() if quoted in text]


def test_every_entry_is_quoted_once_and_explained() -> None:
    assert len(ENTRIES) >= 35 and len(set(ENTRIES)) == len(ENTRIES)
    parts = re.split(r"^### .*$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(parts) == len(ENTRIES)
    assert all(len(part.split("## ")[0].split()) >= 8 for part in parts)
