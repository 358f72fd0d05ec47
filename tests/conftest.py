"""Which tests stay together when the check command runs two at a time, and which of them begin first."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

WHOLE_FOLDERS = ("tests/architecture/", "tests/commands/")
LONG_RUNS = ("tests/seam/", "tests/commands/")


def unit_of(nodeid: str) -> str:
    """What one worker runs in one piece: a file, whose tests share servers; all of `commands`, whose files share a
    clone; all of `architecture`, whose files read the same sources; a single test of `seam`."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/seam/"):
        return nodeid
    return next((folder for folder in WHOLE_FOLDERS if path.startswith(folder)), path)


class ByWhatIsShared(LoadScopeScheduling):
    """xdist's own scheduler with other units. Its loadgroup does nothing under pytest 9: marks reach no node id."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """The scheduler of a run with several workers."""
    return ByWhatIsShared(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long units begin first, so that no worker is left alone with one at the end."""
    real_parts = {unit_of(item.nodeid) for item in items if item.get_closest_marker("ci")}
    items.sort(key=lambda item: (not item.nodeid.startswith(LONG_RUNS), unit_of(item.nodeid) not in real_parts))
