"""How a wrong configuration is told to the user: every problem at once, each with its key and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """One or more problems with keys, each a line that starts with the key's full path."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely meant: its last word elsewhere in the tree, else the closest spelling."""
    names = list(known)
    last = name.rsplit(".", 1)[-1]
    same_word = [n for n in names if n.rsplit(".", 1)[-1] == last]
    pool = same_word or [n for n in names if n.rsplit(".", 1)[-1] in _close(last, names)] or names
    found = difflib.get_close_matches(name, pool, n=1, cutoff=0.3 if same_word else 0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?', or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def listed(name: str, known: Iterable[str]) -> str:
    """'known: a, b, c; did you mean b?' for names that come from a table."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"known: {', '.join(names)}" + (f"; did you mean {close[0]}?" if close else "")


def _close(word: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, sorted({n.rsplit(".", 1)[-1] for n in names}), n=3, cutoff=0.75)
