"""Is generated code what its source generates, marked, and loadable with the libraries that packages ask for?"""

import re
import tomllib

import make_arithmetic_data
import protogen
from packaging.requirements import Requirement
from packaging.version import Version
from sources import GENERATED, ROOT, shown, tracked_files

STUBS = ROOT / "packages/skyrl-rollout/src/skyrl_rollout/v1"


def test_regenerating_the_stubs_changes_nothing() -> None:
    assert protogen.differences() == []


def test_the_default_runs_data_is_what_its_tool_writes() -> None:
    assert {path.name: path.read_text() for path in make_arithmetic_data.files()} == {
        path.name: content for path, content in make_arithmetic_data.files().items()
    }


def test_stubs_lie_beside_each_other_and_say_that_they_are_generated() -> None:
    generated = [path for path in tracked_files() if path.name.endswith(GENERATED)]
    assert {path.parent for path in generated} == {STUBS}
    unmarked = [
        shown(path) for path in generated if path.suffix == ".py" and "DO NOT EDIT" not in path.read_text()[:400]
    ]
    assert unmarked == []


def test_the_package_asks_for_libraries_that_its_stubs_load_under() -> None:
    project = tomllib.loads((ROOT / "packages/skyrl-rollout/pyproject.toml").read_text())["project"]
    lowest = {}
    for line in project["dependencies"]:
        requirement = Requirement(line)
        lowest[requirement.name] = next(Version(s.version) for s in requirement.specifier if s.operator == ">=")
    for path in STUBS.glob("*_pb2_grpc.py"):
        generated = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())
        assert generated and lowest["grpcio"] >= Version(generated[1]), shown(path)
    for path in STUBS.glob("*_pb2.py"):
        generated = re.search(r"Protobuf Python Version: ([\d.]+)", path.read_text())
        assert generated and lowest["protobuf"] >= Version(generated[1]), shown(path)
