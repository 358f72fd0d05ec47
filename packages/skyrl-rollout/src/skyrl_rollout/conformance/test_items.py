"""Each item as one test; `skyrl_rollout.pytest_plugin` says against which server."""

from __future__ import annotations

import pytest

from skyrl_rollout.conformance.item import FAILED, PASSED, Item
from skyrl_rollout.conformance.suite import check
from skyrl_rollout.conformance.table import ITEMS
from skyrl_rollout.pytest_plugin import RunningSuite

IN_ORDER = sorted(ITEMS, key=lambda item: (item.when == "end", item.number))


@pytest.mark.parametrize("item", IN_ORDER, ids=lambda item: f"{item.number:02}")
def test_item(item: Item, rollout_suite: RunningSuite) -> None:
    """Passes, fails with a sentence, or is skipped with what it needs."""
    outcome = rollout_suite.run(lambda target: check(target, item))
    if outcome.status == FAILED:
        pytest.fail(f"{item.title}: {outcome.reason}", pytrace=False)
    if outcome.status != PASSED:
        pytest.skip(f"{outcome.status}: {outcome.reason}")
