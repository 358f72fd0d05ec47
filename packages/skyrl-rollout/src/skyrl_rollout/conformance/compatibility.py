"""The table of COMPATIBILITY.md: how each item ends on each server of this project, and what it needs.

python -m skyrl_rollout.conformance.compatibility            # prints the table
python -m skyrl_rollout.conformance.compatibility PAGE.md    # puts it in the place of the one in a page
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from skyrl_rollout.conformance.expected import EXPECTED, expected_status
from skyrl_rollout.conformance.item import NOT_OFFERED, STATUSES, Item
from skyrl_rollout.conformance.table import ITEMS

ALWAYS_THERE = "wire"
FIXED_COLUMNS = ("item", "what is promised", "needs")
HEAD = f"| {FIXED_COLUMNS[0]} |"


def table() -> str:
    """One row per item, one column per kind of server, and the totals."""
    head, *rows = (f"| {' | '.join(row)} |\n" for row in _rows())
    return "".join([head, "|" + "---|" * (len(FIXED_COLUMNS) + len(EXPECTED)) + "\n", *rows])


def with_table(page: str) -> str:
    """The page with today's table. Raises ValueError for one that has none."""
    lines = page.splitlines(keepends=True)
    rows = [i for i, line in enumerate(lines) if line.startswith(HEAD)]
    if len(rows) != 1:
        raise ValueError(f"the page has {len(rows)} lines that begin with {HEAD!r}, expected the one table")
    after = next((i for i in range(rows[0], len(lines)) if not lines[i].startswith("|")), len(lines))
    return "".join([*lines[: rows[0]], table(), *lines[after:]])


def _rows() -> Iterator[list[str]]:
    yield [*FIXED_COLUMNS, *(f"`{server}`" for server in EXPECTED)]
    for item in ITEMS:
        yield [str(item.number), _promise(item), _needs(item), *(_ending(item, server) for server in EXPECTED)]
    yield ["", "totals", "", *(_totals(server) for server in EXPECTED)]


def _promise(item: Item) -> str:
    return f"{item.title} (E)" if item.engine else item.title


def _needs(item: Item) -> str:
    """What has to be there, and which capability, where the item depends on one."""
    capability = () if item.capability is None else (f"`{item.capability}`",)
    return ", ".join([*(need for need in item.needs if need != ALWAYS_THERE), *capability])


def _ending(item: Item, server: str) -> str:
    status = expected_status(server, item.number)
    return f"{status}: `{item.capability}`" if status == NOT_OFFERED else status


def _totals(server: str) -> str:
    counts = Counter(expected_status(server, item.number) for item in ITEMS)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(table(), end="")
    for name in sys.argv[1:]:
        Path(name).write_text(with_table(Path(name).read_text()))
