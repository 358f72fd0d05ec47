"""A real `arctic-serve` process on the tiny model, in the server environment that the launcher made."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from training_run import ROOT

BINARY = ROOT / ".venvs/server/bin/arctic-serve"
TINY_MODEL = ROOT / "packages/skyrl-core/src/skyrl/train/quickstart/tiny_model"


class VllmServer:
    """Context manager; `url` is known once the ready line is out. Skips the test where the environment is not built."""

    def __init__(self, log: Path, *, model: Path = TINY_MODEL) -> None:
        if not BINARY.exists():
            pytest.skip("the server environment .venvs/server is not built: run `uv run tools/serve.py --sync-only`")
        self.log, self.model = log, model
        self.url = ""

    def __enter__(self) -> Self:
        command = [str(BINARY), "--model", str(self.model), "--listen", "127.0.0.1:0"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while not (found := re.search(r"ready url=(\S+)", self.log.read_text(errors="replace"))):
            assert self.process.poll() is None, f"arctic-serve ended:\n{self.log.read_text(errors='replace')[-3000:]}"
            assert time.monotonic() < deadline, "arctic-serve was not ready within 240 s"
            time.sleep(0.2)
        self.url = found.group(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
