"""Another distribution owns the import name too: refused at once, naming both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_other_owner_of_the_name_is_refused(tmp_path: Path) -> None:
    metadata = tmp_path / "skyrl-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl\nVersion: 9.9\n")
    result = subprocess.run(
        [sys.executable, "-c", "import skyrl"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "skyrl-core (this one) and skyrl 9.9" in result.stderr
