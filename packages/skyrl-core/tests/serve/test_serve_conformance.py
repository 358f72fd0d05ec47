"""Does `skyrl-serve` keep the rollout protocol, item by item as COMPATIBILITY.md says?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import skyrl.train.quickstart
from skyrl_rollout.conformance import ITEMS, Launcher, Plan, connected, run
from skyrl_rollout.conformance.expected import unexpected
from skyrl_rollout.conformance.report import line

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]
TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"
COMMAND = f"{sys.executable} -m skyrl.serve --listen {{listen}} --model {{model}} --dtype float32 --delta"


async def test_every_item_ends_as_the_table_of_expectations_says() -> None:
    async with connected(Plan(launcher=Launcher(COMMAND, model=TINY_MODEL), model=TINY_MODEL)) as target:
        outcomes = await run(target, tell=lambda outcome: print(f"{outcome.seconds:5.1f} s {line(outcome)}"))
    assert unexpected(outcomes, "transformers") == []
    assert len(outcomes) == len(ITEMS)
