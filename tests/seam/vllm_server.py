"""A real `arctic-serve` process on the tiny model, in the server environment that the launcher made."""

from __future__ import annotations

import pytest
from skyrl_rollout.reference.process import ServedProcess
from training_run import ROOT

BINARY = ROOT / ".venvs/server/bin/arctic-serve"
TINY_MODEL = ROOT / "packages/skyrl-core/src/skyrl/train/quickstart/tiny_model"


class VllmServer(ServedProcess):
    """Context manager; skips the test where the environment is not built."""

    def __init__(self) -> None:
        if not BINARY.exists():
            pytest.skip("the server environment .venvs/server is not built: run `uv run tools/serve.py --sync-only`")
        super().__init__([str(BINARY), "--model", str(TINY_MODEL), "--listen", "127.0.0.1:0"], start_timeout_s=240.0)
