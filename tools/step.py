"""What one step of the check command is, and how it runs: with a deadline, in sight, leaving no process behind."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 20.0
READ_BYTES = 65536


@dataclass(frozen=True)
class Step:
    """One row of the table: a command, what it proves, and how long it may take."""

    name: str
    proves: str
    command: tuple[str, ...]
    folder: str = "."
    timeout_s: float = 600.0
    streams: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a step ended: exit code (124 after its deadline), everything it printed, and the seconds it took."""

    code: int
    output: str
    seconds: float


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # Without bytecode every process that imports torch or vLLM compiles it again, a minute each time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # Trainer and server share the cores: threads that spin while they wait stop both.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def _end_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the step's whole process group; after a grace period kill what is left of it."""
    try:
        os.killpg(process.pid, number)
        process.wait(GRACE_S)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _follow(process: subprocess.Popen[bytes], step: Step, deadline: float) -> tuple[bytes, bool]:
    """Read until the step closes its output; shows it at once if it streams. Second value: ended in time."""
    assert process.stdout is not None
    kept = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(timeout=1.0):
                if process.poll() is not None:  # a grandchild may hold the pipe open after the step itself ended
                    return bytes(kept), True
                continue
            chunk = os.read(process.stdout.fileno(), READ_BYTES)
            if not chunk:
                return bytes(kept), True
            kept += chunk
            if step.streams:
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
    return bytes(kept), False


def run(step: Step) -> Outcome:
    """Run one step in its own process group. KeyboardInterrupt ends that group before it goes on."""
    started = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT / step.folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = started + step.timeout_s
    try:
        output, in_time = _follow(process, step, deadline)
        code = process.wait(max(1.0, deadline - time.monotonic())) if in_time else 124
    except subprocess.TimeoutExpired:
        code, output = 124, b""
    finally:
        _end_group(process, signal.SIGINT)
    text = output.decode(errors="replace")
    if code == 124:
        text += f"\n{step.name}: not done after {step.timeout_s:.0f} s, ended\n"
    return Outcome(code, text, time.monotonic() - started)


def executable(name: str) -> str:
    """Path of a program that is installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def python(*arguments: str) -> tuple[str, ...]:
    """A command of this Python."""
    return (sys.executable, *arguments)


def closing_line(output: str, words: Sequence[str]) -> str | None:
    """The last line that holds one of the words."""
    return next((line for line in reversed(output.splitlines()) if any(word in line for word in words)), None)
