"""Does the check command run every step, end what hangs, and close with the test runner's own line?"""

import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import check
import psutil
import pytest
from fresh_clone import ROOT
from step import Outcome, Step, run


def python(code: str, **more: object) -> Step:
    return Step("probe", "a step of this test", (sys.executable, "-c", code), **more)


def is_gone(pid: int, timeout_s: float = 5.0) -> bool:
    """Whether a process ended; one that init has not collected yet has."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.wait(timeout_s) is None
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_step_reports_its_exit_code_and_output() -> None:
    outcome = run(python("print('seen'); raise SystemExit(3)"))
    assert (outcome.code, outcome.output.strip()) == (3, "seen")


def test_a_step_that_hangs_is_ended_with_its_children_and_says_so(tmp_path: Path) -> None:
    pid_file = tmp_path / "child"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    started = time.monotonic()
    outcome = run(python(hangs, timeout_s=2.0))
    assert outcome.code == 124
    assert "probe: not done after 2 s" in outcome.output
    assert time.monotonic() - started < 30
    assert is_gone(int(pid_file.read_text()))


def test_steps_run_without_stdin_and_with_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    outcome = run(python("import sys; print(repr(sys.stdin.read()), sys.dont_write_bytecode)"))
    assert outcome.output.split() == ["''", "False"]


def test_a_failed_step_does_not_stop_the_next_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = check.run_all([Step("first", "fails", (sys.executable, "-c", "raise SystemExit(1)")),
                              Step("second", "passes", (sys.executable, "-c", ""))])  # fmt: skip
    assert [outcome.code for outcome in outcomes.values()] == [1, 0]
    assert check.close(outcomes, 1.0) == 1
    assert "failed: first" in capsys.readouterr().out


def test_the_last_line_is_the_test_runners_own(capsys: pytest.CaptureFixture[str]) -> None:
    closing = "== 2 passed, 1 deselected in 0.10s =="
    assert check.close({"ruff": Outcome(0, "", 1.0), "tests": Outcome(0, f"..\n{closing}\n", 1.0)}, 2.0) == 0
    assert capsys.readouterr().out.splitlines()[-1] == closing


@pytest.mark.parametrize("tier", check.TIERS)
def test_every_tier_ends_with_the_tests(tier: str) -> None:
    steps = check.steps(tier)
    assert steps[-1].name == "tests"
    assert len({step.name for step in steps}) == len(steps)
    assert ("server" in [step.name for step in steps]) == (tier != "quick")


@pytest.mark.ci
def test_tests_that_share_a_server_run_in_one_worker() -> None:
    files = ("tests/architecture/test_files.py", "tests/architecture/test_workspace.py", "tests/commands/test_bench.py")
    quick = ("-m", "not ci and not long", "--verbose", "--color=no")
    command = [sys.executable, "-m", "pytest", *check.TWO_AT_A_TIME, *quick, *files]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100).stdout
    workers = defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\].* (?:PASSED|SKIPPED) ([^:]+)::", shown, re.MULTILINE):
        workers[file].add(worker)
    assert set(workers) == set(files), shown[-2000:]
    assert all(len(names) == 1 for names in workers.values()), workers
    assert len(set.union(*workers.values())) == 2, "both workers have work"
