"""Which source of rollouts a `trainer.mode` means; `generate` has none, it trains nothing."""

from __future__ import annotations

from skyrl.train.sources.fully_async import FullyAsync
from skyrl.train.sources.one_step_off import OneStepOff
from skyrl.train.sources.source import RolloutSource

SOURCES: dict[str, type[RolloutSource]] = {
    "plain": RolloutSource,
    "one_step_off": OneStepOff,
    "fully_async": FullyAsync,
}
