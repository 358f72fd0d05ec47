"""How a wrong configuration is told to the user: every problem at once, each with its key and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Least likeness of a name that is worth proposing.
CLOSE = 0.75


class ConfigError(ValueError):
    """One or more problems with keys, each a line that starts with the key's full path."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely meant; None where nothing is close.

    The last words count twice as much as the whole paths, which share their sections anyway; an equal last word is
    close whatever stands before it.
    """
    score, found = max(((_likeness(name, other), other) for other in known), default=(0.0, None))
    return found if found is not None and (score >= CLOSE or _last(name) == _last(found)) else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?', or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def listed(name: str, known: Iterable[str]) -> str:
    """'known: a, b, c; did you mean b?' for names that come from a table."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"known: {', '.join(names)}" + (f"; did you mean {close[0]}?" if close else "")


def _likeness(name: str, other: str) -> float:
    """0 to 1."""
    words = difflib.SequenceMatcher(None, _last(name), _last(other)).ratio()
    return (2 * words + difflib.SequenceMatcher(None, name, other).ratio()) / 3


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]
