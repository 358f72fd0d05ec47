"""What a stranger has after `git clone`: the committed tree, an empty environment, a shell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SHOWN_CHARS = 6000
# Set by uv, by pytest or by the check command for its own children; a stranger's shell has none of them.
FOREIGN = ("UV", "UV_RUN_RECURSION_DEPTH", "UV_PROJECT_ENVIRONMENT", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME",
           "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST")  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """How a command ended: exit code and everything it printed."""

    code: int
    output: str

    def ok(self) -> Ran:
        """Itself if the exit code is 0; AssertionError with the end of the output otherwise."""
        assert self.code == 0, f"exit code {self.code}:\n{self.output[-SHOWN_CHARS:]}"
        return self


class FreshClone:
    """A clone of the committed tree in which commands run verbatim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, timeout=120)

    def run(self, command: str, *, timeout_s: float, **environ: str) -> Ran:
        """Run a shell line in the clone, without stdin; after the deadline its process group is ended."""
        log = self._new_log()
        with log.open("wb") as sink:
            process = self._spawn(command, sink.fileno(), environ)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                end_group(process)
                raise AssertionError(
                    f"not done after {timeout_s:.0f} s: {command}\n{self._text(log)[-SHOWN_CHARS:]}"
                ) from None
        return Ran(code, self._text(log))

    @contextmanager
    def background(self, command: str, *, until: str, timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
        """Run a shell line meanwhile, from when it has printed `until`; it ends well, by itself or on SIGTERM."""
        log = self._new_log()
        with log.open("wb") as sink:
            process = self._spawn(command, sink.fileno(), {})
        deadline = time.monotonic() + timeout_s
        try:
            while until not in self._text(log):
                said = self._text(log)[-SHOWN_CHARS:]
                assert process.poll() is None, f"ended with {process.returncode} before {until!r}: {command}\n{said}"
                assert time.monotonic() < deadline, f"no {until!r} within {timeout_s:.0f} s: {command}\n{said}"
                time.sleep(0.2)
            yield process
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            code = process.wait(60)
            assert code in (0, -signal.SIGTERM, 128 + signal.SIGTERM), f"exit code {code} after SIGTERM: {command}"
        finally:
            end_group(process)

    def leftovers(self, timeout_s: float = 20.0) -> list[str]:
        """Command lines of processes that still run from this clone; empty is what a test wants."""
        found = [p for p in psutil.process_iter(["cmdline"]) if str(self.folder) in " ".join(p.info["cmdline"] or ())]
        _, alive = psutil.wait_procs(found, timeout=timeout_s)
        return [" ".join(p.info["cmdline"]) for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def remove(self) -> None:
        """Delete the clone with its environments."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spawn(self, command: str, sink: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=strangers_environment() | environ,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _new_log(self) -> Path:
        logs = self.folder.parent / "outputs"
        logs.mkdir(exist_ok=True)
        return logs / f"{len(list(logs.iterdir()))}.txt"

    @staticmethod
    def _text(log: Path) -> str:
        return log.read_text(errors="replace")


def strangers_environment() -> dict[str, str]:
    """This process's environment without what the running environment put into it."""
    own = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    kept["PATH"] = os.pathsep.join(part for part in kept.get("PATH", os.defpath).split(os.pathsep) if part != own)
    return kept


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a command's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(30)
