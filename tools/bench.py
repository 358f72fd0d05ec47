"""How fast the seam is, as ratios of what this machine can do in the same run: a table, or the same as JSON.

    uv run tools/bench.py seam             # tokens/s through gRPC over AsyncLLM in-process
    uv run tools/bench.py weights          # a publish over one core's memcpy, phase by phase
    uv run tools/bench.py scale --json     # one client with 4,096 streams on 1 to 64 servers
    uv run tools/bench.py shared-prefix    # an update with each prompt computed once over separate rows
    uv run tools/bench.py seam --small     # a few seconds, to see that it runs; no bound is judged
    uv run tools/bench.py seam --record    # also into packages/skyrl-rollout/docs/performance.md, or the bench's page

Exit code 0: every bound holds; 1: one does not; 2: something that the bench needs is not there.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from benches import scale, seam, shared_prefix, weights
from benches.report import Report, recorded, table

CORES = 2
PACKAGES = Path(__file__).parents[1] / "packages"
PAGES = {"shared-prefix": PACKAGES / "skyrl-arctic/docs/shared-prefix.md"}
PAGE = PACKAGES / "skyrl-rollout/docs/performance.md"
"""Where a bench's table is kept: the page of its own, or this one."""

BENCHES: dict[str, Callable[[bool], Coroutine[None, None, Report]]] = {
    "seam": seam.measure,
    "weights": weights.measure,
    "scale": scale.measure,
    "shared-prefix": shared_prefix.measure,
}
"""Name -> what measures it; the argument says whether in small."""


def pin() -> None:
    """Binds this process and all that it starts to the same cores, whatever the machine has."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    # Without bytecode every process that imports vLLM compiles it again, a minute each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Threads that spin while they wait stop whoever shares their core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    """Measure one of the table, show it, and tell by the exit code whether its bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--small", action="store_true", help="few and small rounds; no bound is judged")
    parser.add_argument("--record", action="store_true", help="write the table into the bench's page")
    options = parser.parse_args()
    if options.record and options.small:
        parser.error("--record is for runs in full: leave out --small")
    pin()
    try:
        report = asyncio.run(BENCHES[options.name](options.small))
    except FileNotFoundError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), indent=2) if options.json else table(report))
    if options.record:
        page = PAGES.get(options.name, PAGE)
        page.write_text(recorded(page.read_text(), report))
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
