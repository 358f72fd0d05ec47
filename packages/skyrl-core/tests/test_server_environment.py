"""The servers' environment: left alone where it is in line, never changed under a running server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
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


WORKSPACE = {
    "pyproject.toml": """
        [project]
        name = "root"
        version = "0"
        requires-python = ">=3.11"
        [tool.uv]
        package = false
        [tool.uv.workspace]
        members = ["packages/*"]
    """,
    "packages/server/pyproject.toml": """
        [project]
        name = "server"
        version = "0"
        requires-python = ">=3.11"
        [tool.uv]
        package = false
    """,
}


@pytest.fixture
def entry(tmp_path: Path) -> table.ServerEntry:
    """A server whose package is a member of a small workspace that needs nothing from a package index."""
    for name, text in WORKSPACE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    subprocess.run([environment.find_uv(), "lock", "--offline", "--quiet"], cwd=tmp_path, check=True)
    return table.ServerEntry("small", ("serve", "{listen}"), root=tmp_path, package="server", download_gb={"cpu": 4.0})


def test_the_first_sync_says_how_much_may_be_downloaded_before_it_does(
    entry: table.ServerEntry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    binaries, descriptor = environment.ensure(entry, "cpu", lambda what: None)
    os.close(descriptor)
    assert entry.root is not None
    assert binaries == entry.root / ".venvs/server/bin"
    assert (binaries / "python").exists()
    said = [record.message for record in caplog.records]
    assert "uv downloads up to 4.0 GB" in said[0]
    assert "is ready after" in said[-1]


def test_an_environment_whose_making_was_interrupted_is_made_anew(entry: table.ServerEntry) -> None:
    def interrupt(what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environment.ensure(entry, "cpu", interrupt)
    assert entry.root is not None
    folder = entry.root / ".venvs/server"
    half_installed = folder / "lib/half-installed"
    half_installed.mkdir(parents=True)
    for _ in range(2):
        binaries, descriptor = environment.ensure(entry, "cpu", lambda what: None)
        os.close(descriptor)
        assert (binaries / "python").exists() and not half_installed.exists()
        assert [path.name for path in folder.parent.glob("*unfinished")] == []


def test_a_lock_that_is_out_of_date_is_told_with_what_uv_said(entry: table.ServerEntry) -> None:
    assert entry.root is not None
    member = entry.root / "packages/server/pyproject.toml"
    member.write_text(member.read_text().replace('version = "0"', 'version = "0"\ndependencies = ["numpy"]'))
    with pytest.raises(ValueError, match=r"making the server's environment failed: .*--locked(\n|.)*\| "):
        environment.ensure(entry, "cpu", lambda what: None)


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
