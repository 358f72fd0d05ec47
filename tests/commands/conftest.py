"""One fresh clone for all commands of a test session; it is removed at the end."""

from collections.abc import Iterator

import pytest
from fresh_clone import FreshClone


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshClone]:
    fresh = FreshClone(tmp_path_factory.mktemp("fresh") / "clone")
    yield fresh
    fresh.remove()
