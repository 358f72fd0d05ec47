"""Raw calls to the `server` that a test file chooses, and an epoch that owns it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from raw_calls import RawCalls, raw_calls
from skyrl_rollout.reference.process import ServedProcess


@pytest.fixture
async def calls(server: ServedProcess) -> AsyncIterator[RawCalls]:
    async with raw_calls(server) as opened:
        yield opened


@pytest.fixture
async def epoch(calls: RawCalls) -> int:
    return await calls.epoch()
