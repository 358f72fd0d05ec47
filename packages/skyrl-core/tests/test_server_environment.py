"""The servers' environment: left alone where it is in line, never changed under a running server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from skyrl.train.config import InferenceEngineConfig
from skyrl.train.launch import environment, table


def test_an_environment_that_a_server_runs_from_is_not_changed(tmp_path: Path) -> None:
    held = environment._hold(tmp_path, environment.fcntl.LOCK_SH)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(held,))
    os.close(held)
    with pytest.raises(ValueError, match="a server runs from it"):
        environment._refuse_if_in_use(tmp_path)
    assert child.stdin is not None
    child.stdin.close()
    child.wait(10)
    environment._refuse_if_in_use(tmp_path)


def test_the_progress_line_says_how_much_came_and_how_long_it_may_take() -> None:
    line = environment._progress(30.0, 1.0, 4.0)
    assert line == "the server's environment: 30 s, 1.0 of up to 4.0 GB received, about 90 s left"
    assert environment._progress(30.0, 0.0, 0.0) == "the server's environment: 30 s"


@pytest.mark.ci
def test_an_environment_in_line_costs_no_time() -> None:
    entry = table.find(InferenceEngineConfig())
    binaries, descriptor = environment.ensure(entry, "cpu", lambda what: None)
    os.close(descriptor)
    started = time.monotonic()
    again, descriptor = environment.ensure(entry, "cpu", lambda what: None)
    seconds = time.monotonic() - started
    os.close(descriptor)
    assert again == binaries
    assert (binaries / "python").exists()
    assert seconds < 1.0
