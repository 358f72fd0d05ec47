"""One training run as a user starts it: a process, its output and the metrics that it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "packages/skyrl-core/src/skyrl/train/quickstart/embedded.yaml"
MAIN_BASE = ("-m", "skyrl.train.entrypoints.main_base")


class TrainingRun:
    """`python -m skyrl.train.entrypoints.main_base @embedded.yaml <overrides>` with its files under `folder`."""

    def __init__(
        self, folder: Path, *overrides: str, base: Path | None = EMBEDDED, entrypoint: Sequence[str] = MAIN_BASE
    ) -> None:
        """`entrypoint` is what follows `python`; `base` is the @file under the overrides."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.output_path = folder / "output.txt"
        places = [
            f"trainer.ckpt_path={folder}/ckpts",
            f"trainer.export_path={folder}/exports",
            f"trainer.log_path={folder}/logs",
            "trainer.logger=[jsonl]",
        ]
        base_argument = [f"@{base}"] if base else []
        self.command = [sys.executable, *entrypoint, *base_argument, *places, *overrides]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environ: str) -> TrainingRun:
        with self.output_path.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        return self

    def wait(self, timeout_s: float = 600) -> int:
        assert self.process is not None, "start() first"
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the run did not end within {timeout_s} s; its output:\n{self.output[-4000:]}"
            ) from None

    def run(self, timeout_s: float = 600) -> TrainingRun:
        """Runs to the end and fails with the output unless the exit code is 0."""
        code = self.start().wait(timeout_s)
        assert code == 0, f"exit code {code}; output:\n{self.output[-6000:]}"
        return self

    def wait_for_step(self, step: int, timeout_s: float = 300) -> None:
        assert self.process is not None, "start() first"
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(row["step"] >= step for row in self.metrics()):
                return
            assert self.process.poll() is None, f"the run ended before step {step}:\n{self.output[-4000:]}"
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"step {step} not reached within {timeout_s} s:\n{self.output[-4000:]}")

    def wait_for_output(self, text: str, timeout_s: float = 120) -> None:
        assert self.process is not None, "start() first"
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline, f"{text!r} did not appear within {timeout_s} s:\n{self.output[-4000:]}"
            assert self.process.poll() is None, f"the run ended before {text!r} appeared:\n{self.output[-4000:]}"
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None, "start() first"
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None, "start() first"
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL of the trainer alone; its children must notice by themselves."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace") if self.output_path.exists() else ""

    def metrics(self) -> list[dict[str, float]]:
        """One row per logged step, in order; a resumed run repeats none."""
        path = self.folder / "logs" / "metrics.jsonl"
        if not path.exists():
            return []
        whole_lines = path.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole_lines]

    def steps(self) -> dict[int, dict[str, float]]:
        """Training steps only: step -> metrics."""
        return {int(row["step"]): row for row in self.metrics() if "reward/avg_raw_reward" in row}

    def rewards(self) -> list[float]:
        """Mean raw reward by training step."""
        return [row["reward/avg_raw_reward"] for _, row in sorted(self.steps().items())]


def all_gone(processes: list[psutil.Process], timeout_s: float = 20) -> list[psutil.Process]:
    """The processes that still live after `timeout_s`; empty is what a test wants."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
