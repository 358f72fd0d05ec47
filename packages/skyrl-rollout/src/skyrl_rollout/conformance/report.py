"""How the outcomes are shown: a plain table, JSON, and the totals."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from skyrl_rollout.conformance.item import STATUSES, Outcome
from skyrl_rollout.conformance.target import Target

WIDTH = 120
INDENT = " " * 17


def heading(target: Target) -> str:
    """Which server is tested."""
    info = target.info
    return f"{target.url}: {info.server_build}, model {info.model.name}, instance {info.instance_id}\n"


def line(outcome: Outcome) -> str:
    """One row; the reason follows on lines of its own."""
    item = outcome.item
    mark = " (E)" if item.engine else ""
    first = f"{item.number:>2}  {outcome.status:<11}  {item.title}{mark}"
    if not outcome.reason:
        return first
    told = {"not run": "needs: ", "not offered": "capability: "}.get(outcome.status, "") + outcome.reason
    rows = [
        textwrap.fill(row, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False)
        for row in told.splitlines()
    ]
    return "\n".join([first, *rows])


def totals(outcomes: Sequence[Outcome]) -> str:
    """ "52 passed, 1 failed, 1 not run"."""
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "nothing ran"


def as_json(outcomes: Sequence[Outcome], server: dict[str, Any]) -> str:
    """The same for a program."""
    rows = [
        {
            "number": o.item.number,
            "title": o.item.title,
            "needs_engine": o.item.engine,
            "status": o.status,
            "reason": o.reason,
            "seconds": round(o.seconds, 3),
        }
        for o in outcomes
    ]
    counts = Counter(o.status for o in outcomes)
    return json.dumps({"server": server, "totals": {s: counts[s] for s in STATUSES}, "items": rows}, indent=2)
