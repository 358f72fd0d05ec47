"""Does `arctic-serve` on a CPU keep the rollout protocol, item by item as COMPATIBILITY.md says?"""

from __future__ import annotations

import pytest
from serve_process import ARCTIC_SERVE, TINY_MODEL, need_environment
from skyrl_rollout.conformance import ITEMS, Launcher, Plan, connected, run
from skyrl_rollout.conformance.expected import unexpected
from skyrl_rollout.conformance.report import line

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]
COMMAND = f"{ARCTIC_SERVE} --listen {{listen}} --model {{model}} --dtype float32 --delta --max-loras 2"


async def test_every_item_ends_as_the_table_of_expectations_says(monkeypatch: pytest.MonkeyPatch) -> None:
    need_environment()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # without bytecode importing vLLM takes a minute
    async with connected(Plan(launcher=Launcher(COMMAND, model=TINY_MODEL), model=TINY_MODEL)) as target:
        outcomes = await run(target, tell=lambda outcome: print(f"{outcome.seconds:5.1f} s {line(outcome)}"))
    assert unexpected(outcomes, "engine-cpu") == []
    assert len(outcomes) == len(ITEMS)
