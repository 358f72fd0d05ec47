"""Which tests stay together when the check command runs two at a time: those that share a server or a clone."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is one group, because its tests share servers; `commands` is one, because its files share a clone; the
    runs in `seam` share nothing, so each goes where there is room."""
    for item in items:
        if TESTS / "seam" in item.path.parents:
            continue
        together = "commands" if TESTS / "commands" in item.path.parents else item.path.stem
        item.add_marker(pytest.mark.xdist_group(together))
