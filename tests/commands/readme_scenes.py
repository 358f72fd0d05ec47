"""Which shell blocks a Markdown file has, and which of them need another one to run meanwhile."""

import re
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```sh([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Scene:
    """A block and the `sh background` blocks that stand directly before it."""

    command: str
    background: tuple[str, ...] = ()


def scenes(markdown: Path) -> list[Scene]:
    """Every shell block, in order. ValueError for a block of an unknown kind and for a server that nobody uses."""
    found: list[Scene] = []
    waiting: list[str] = []
    for kind, text in BLOCK.findall(markdown.read_text()):
        if kind.strip() == "background":
            waiting.append(text.strip())
        elif kind.strip() == "":
            found.append(Scene(text.strip(), tuple(waiting)))
            waiting = []
        else:
            raise ValueError(f"{markdown.name}: a block opens with ```sh {kind.strip()}; known: sh, sh background")
    if waiting:
        raise ValueError(f"{markdown.name}: no block follows the background block {waiting[0]!r}")
    return found
