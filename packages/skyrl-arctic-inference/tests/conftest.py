"""One vLLM server for all tests of this folder that do not end it, and the same model under transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve_process import CONTEXT, TINY_MODEL, ServeProcess, need_environment
from served_model import ServedModel
from skyrl_rollout.client import RolloutClient


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    need_environment()
    with ServeProcess(TINY_MODEL, "--max-model-len", str(CONTEXT), "--max-num-seqs", "64") as running:
        yield running


@pytest.fixture(scope="session")
def model() -> ServedModel:
    return ServedModel(TINY_MODEL)


@pytest.fixture
async def client(server: ServeProcess):
    async with await RolloutClient.connect(server.url, timeout_s=20) as connected:
        yield connected
