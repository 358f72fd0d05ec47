"""How a command ends, whatever its work does; each in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

INTERRUPTED_IN_A_DESTRUCTOR = """
class Deaf:
    def __del__(self):
        signal.raise_signal(signal.{name})

def work():
    Deaf()
    time.sleep(20)
"""


def end_of(work: str) -> subprocess.CompletedProcess[str]:
    """`work` is source that defines a function of that name."""
    source = "import signal, time\nfrom skyrl.train.entrypoints.exits import run_to_exit\n"
    source += f"{work}\nrun_to_exit(work)\n"
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("def work(): pass", 0),
        ("def work(): raise SystemExit(7)", 7),
        ("def work(): raise ValueError('mend it')", 1),
        ("from skyrl.train.config.problems import ConfigError\ndef work(): raise ConfigError(['a: b'])", 2),
        ("def work(): signal.raise_signal(signal.SIGINT)", 130),
        ("def work(): signal.raise_signal(signal.SIGTERM)", 143),
        ("def work(): signal.raise_signal(signal.SIGHUP)", 129),
        ("signal.signal(signal.SIGHUP, signal.SIG_IGN)\ndef work(): signal.raise_signal(signal.SIGHUP)", 0),
        ("def work(): open('/dev/full', 'w', buffering=1).write('x\\n')", 1),
        ("from skyrl.train.failures import RunFailed\ndef work(): raise RunFailed('a worker died')", 1),
    ],
)
def test_the_exit_code_says_how_the_work_ended(work: str, code: int) -> None:
    ended = end_of(work)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_defect_shows_its_traceback() -> None:
    ended = end_of("def work(): [][0]")
    assert ended.returncode == 1
    assert "IndexError" in ended.stderr


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_arrives_inside_a_destructor_is_not_lost(name: str, code: int) -> None:
    assert end_of(INTERRUPTED_IN_A_DESTRUCTOR.format(name=name)).returncode == code


def test_a_terminal_gets_its_cursor_back() -> None:
    ours, terminal = pty.openpty()
    source = "from skyrl.train.entrypoints.exits import run_to_exit\nrun_to_exit(lambda: [][0])"
    ended = subprocess.run([sys.executable, "-c", source], stdout=terminal, stderr=subprocess.PIPE, timeout=60)
    os.close(terminal)
    assert ended.returncode == 1
    assert os.read(ours, 100) == b"\x1b[?25h"
    os.close(ours)
