"""Whether this tree may be merged: lint, types, import direction, protocol, lock and tests, as one table of steps.

    uv run tools/check.py                  # tier ci: at most 25 minutes on two cores
    uv run tools/check.py --tier quick     # at most 3 minutes
    uv run tools/check.py --tier long      # everything, by hand or nightly
    uv run tools/check.py --list           # the table
    uv run tools/check.py --only ruff --only types

Every step runs even if an earlier one failed; the exit code is 0 only if all passed. The last line printed is the test
runner's own closing line.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence

from step import Outcome, Step, closing_line, executable, python, run

TIERS = {
    "quick": ("not ci and not long", 900.0),
    "ci": ("not long", 4200.0),
    "long": ("ci or long or not ci", 12 * 3600.0),
}
"""Tier -> which tests pytest selects by their markers, and the seconds after which a run counts as hung. The aims, 3
and 25 minutes on two quiet cores, are lower: a busy machine is slow, not wrong."""

TWO_AT_A_TIME = ("--numprocesses=2", "--dist=loadscope", "--no-loadscope-reorder", "--max-worker-restart=0")
"""Most tests wait for a process to start, load or end. tests/conftest.py says which of them stay together, and keeps
an order that has the long runs first. A worker that dies ends the tests: with another in its place they never ended."""

SERVER_TIMEOUT_S = 1200.0
SUMMARY_WORDS = (" passed", " failed", " error", "no tests ran", " deselected")


def steps(tier: str) -> tuple[Step, ...]:
    """The one table: what is run, in this order, and what it proves."""
    uv = os.environ.get("UV") or shutil.which("uv") or "uv"
    markers, tests_timeout_s = TIERS[tier]
    before_tests = (
        Step("lock", "uv.lock is what the pyproject files resolve to", (uv, "lock", "--check")),
        Step("ruff", "lint: names, imports, docstrings, arguments", python("-m", "ruff", "check")),
        Step("format", "one layout of the code", python("-m", "ruff", "format", "--check")),
        Step("types", "type hints hold in all four packages and the tools", python("-m", "mypy")),
        Step("imports", "packages know each other in one direction only", (executable("lint-imports"), "--no-cache")),
        Step("proto-lint", "the protocol follows the style of its kind", (executable("buf"), "lint"), folder="protos"),
        Step(
            "proto-format", "one layout of the protocol", (executable("buf"), "format", "-d", "--exit-code"), "protos"
        ),
        Step(
            "proto-kept",
            "what the last release speaks is still understood",
            (executable("buf"), "breaking", "--against", "released.binpb"),
            folder="protos",
        ),
        Step("stubs", "regenerating the committed stubs changes nothing", python("tools/protogen.py", "--check")),
    )
    server = Step(
        "server",
        "the server's environment can be made from the lock",
        python("tools/serve.py", "--sync-only"),
        timeout_s=SERVER_TIMEOUT_S,
        streams=True,
    )
    tests = Step(
        "tests",
        f"behaviour and the rules in tests/architecture, tier {tier}",
        python("-m", "pytest", *TWO_AT_A_TIME, "-m", markers, "--durations=15", f"--color={_color()}"),
        timeout_s=tests_timeout_s,
        streams=True,
    )
    return (*before_tests, tests) if tier == "quick" else (*before_tests, server, tests)


def _color() -> str:
    return "yes" if sys.stdout.isatty() else "no"


def show_table(tier: str) -> None:
    """Print the steps of a tier: name, what it proves, the command."""
    for step in steps(tier):
        print(f"{step.name:<13} {step.proves:<58} {' '.join(step.command)}")


def run_all(chosen: Sequence[Step]) -> dict[str, Outcome]:
    """Run the steps in order, each with a line before and after it; a failed step shows what it printed."""
    outcomes: dict[str, Outcome] = {}
    for number, step in enumerate(chosen, start=1):
        print(
            f"[{number}/{len(chosen)}] {step.name:<13} {step.proves}", end="\n" if step.streams else " ... ", flush=True
        )
        outcome = outcomes[step.name] = run(step)
        verdict = "ok" if outcome.code == 0 else f"FAILED (exit code {outcome.code})"
        print(f"{step.name if step.streams else ''} {verdict} in {outcome.seconds:.1f} s", flush=True)
        if outcome.code != 0 and not step.streams:
            print(outcome.output, flush=True)
    return outcomes


def close(outcomes: dict[str, Outcome], total_s: float) -> int:
    """Print what failed and the total, then the test runner's closing line last; return the exit code."""
    failed = [name for name, outcome in outcomes.items() if outcome.code != 0]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(outcomes)} steps passed", f"in {total_s:.0f} s")
    tests = outcomes.get("tests")
    if tests is not None:
        print(closing_line(tests.output, SUMMARY_WORDS) or f"tests ended with {tests.code} and no summary")
    return 1 if failed else 0


def main() -> int:
    """Read the tier, run its steps, close."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="ci")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    names = [step.name for step in steps("ci")]
    parser.add_argument("--only", action="append", choices=names, help="run this step only (may be repeated)")
    options = parser.parse_args()
    if options.list:
        show_table(options.tier)
        return 0
    # a shell that starts this in the background has it ignored, and so would every process that a test interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = [step for step in steps(options.tier) if not options.only or step.name in options.only]
    started = time.monotonic()
    return close(run_all(chosen), time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
