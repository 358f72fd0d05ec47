"""Does each package build into a wheel that holds its own import package, all of it, and nothing else?"""

import configparser
import os
import shutil
import subprocess
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from sources import ROOT, tracked_files

IMPORT_PACKAGES = {
    "skyrl-rollout": "skyrl_rollout",
    "skyrl-core": "skyrl",
    "skyrl-arctic": "arctic_rl",
    "skyrl-arctic-inference": "skyrl_arctic_inference",
}
BUILD_TIMEOUT_S = 300

pytestmark = [pytest.mark.ci, pytest.mark.timeout(BUILD_TIMEOUT_S + 60)]


class Wheel:
    """A built wheel: its distribution, the files in it, and its metadata."""

    def __init__(self, distribution: str, path: Path) -> None:
        self.distribution, self.path = distribution, path
        with zipfile.ZipFile(path) as archive:
            self.files = set(archive.namelist())
            info = f"{distribution.replace('-', '_')}-{path.name.split('-')[1]}.dist-info"
            self.metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
            license = f"{info}/licenses/LICENSE"
            self.license = archive.read(license).decode() if license in self.files else ""
            entries = f"{info}/entry_points.txt"
            self.entry_points = archive.read(entries).decode() if entries in self.files else ""


@pytest.fixture(scope="module", params=IMPORT_PACKAGES)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Source distribution first, then the wheel from it, without the workspace's own sources: as a release does."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is not on the PATH"
    out = tmp_path_factory.mktemp(request.param)
    command = [uv, "build", "--no-sources", "--package", request.param, "--out-dir", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return Wheel(request.param, path)


def test_it_holds_its_own_import_package_and_nothing_else(wheel: Wheel) -> None:
    tops = {name.split("/")[0] for name in wheel.files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {IMPORT_PACKAGES[wheel.distribution]}


def test_it_holds_every_file_of_the_package_that_git_knows(wheel: Wheel) -> None:
    source = ROOT / "packages" / wheel.distribution / "src"
    tracked = {str(path.relative_to(source)) for path in tracked_files() if source in path.parents}
    assert tracked - wheel.files == set()
    assert f"{IMPORT_PACKAGES[wheel.distribution]}/py.typed" in wheel.files


def test_its_entry_points_lead_to_modules_in_it(wheel: Wheel) -> None:
    parsed = configparser.ConfigParser()
    parsed.read_string(wheel.entry_points)
    targets = [value.split(":")[0] for section in parsed.sections() for value in parsed[section].values()]
    missing = [
        t for t in targets if not {f"{t.replace('.', '/')}.py", f"{t.replace('.', '/')}/__init__.py"} & wheel.files
    ]
    assert missing == []


def test_it_holds_the_license(wheel: Wheel) -> None:
    assert wheel.license == (ROOT / "LICENSE").read_text()
    assert wheel.metadata.get_all("License-File") == ["LICENSE"]


def test_its_metadata_names_no_path_and_no_workspace(wheel: Wheel) -> None:
    asked = wheel.metadata.get_all("Requires-Dist") or []
    assert [line for line in asked if "file:" in line or " @ " in line] == []
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.metadata["Requires-Python"] in ("<3.13,>=3.11", ">=3.11,<3.13")
    assert "skyrl-tools" not in " ".join(asked)
