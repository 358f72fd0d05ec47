"""Do the packages fit together: bounds between them, owners of script names, one servers table?"""

import ast
import sys
import tomllib
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sources import ROOT, package_files, tree

OURS = {
    "skyrl-rollout": set(),
    "skyrl-core": {"skyrl-rollout"},
    "skyrl-arctic": {"skyrl-core"},
    "skyrl-arctic-inference": {"skyrl-rollout"},
}
IMPORT_NAMES = {
    "skyrl_rollout": "skyrl-rollout",
    "skyrl": "skyrl-core",
    "arctic_rl": "skyrl-arctic",
    "skyrl_arctic_inference": "skyrl-arctic-inference",
}
SERVER_PACKAGES = ROOT / ".venvs/server/lib"


def project(distribution: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / distribution / "pyproject.toml").read_text())["project"]


def test_the_workspace_holds_these_packages() -> None:
    assert {path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")} == set(OURS)
    assert {name: project(name)["name"] for name in OURS} == {name: name for name in OURS}


@pytest.mark.parametrize("distribution", OURS)
def test_a_package_depends_only_on_those_below_it_with_bounds_that_hold(distribution: str) -> None:
    """uv ignores bounds between workspace members, so they need a gate of their own."""
    asked = [Requirement(line) for line in project(distribution)["dependencies"]]
    ours = {r.name: r for r in asked if r.name in OURS}
    assert set(ours) == OURS[distribution]
    for name, requirement in ours.items():
        assert {s.operator for s in requirement.specifier} >= {">=", "<"}, (
            f"{requirement}: needs a lower and an upper bound"
        )
        assert requirement.specifier.contains(project(name)["version"], prereleases=True), str(requirement)


def test_the_seam_asks_for_no_tensor_library_and_no_engine() -> None:
    asked = {Requirement(line).name for line in project("skyrl-rollout")["dependencies"]}
    assert asked & {"torch", "transformers", "vllm", "ray", "deepspeed", "pydantic"} == set()


# Imported and not declared: parts of a declared distribution, what an extra brings, and clients that users install.
UNDECLARED = {
    "skyrl-rollout": {"opentelemetry", "pytest"},
    "skyrl-core": {"pydantic_core", "wandb", "mlflow"},
    "skyrl-arctic": set(),
    "skyrl-arctic-inference": {"torch", "vllm", "pydantic"},
}


@pytest.mark.parametrize("distribution", OURS)
def test_a_package_declares_what_it_imports(distribution: str) -> None:
    asked = {canonicalize_name(Requirement(line).name) for line in project(distribution)["dependencies"]}
    names = {name for path in package_files(distribution) for name in imported(tree(path))}
    names -= set(sys.stdlib_module_names) | UNDECLARED[distribution]
    assert {name for name in names if not owners_of(name) & (asked | {distribution})} == set()


def owners_of(name: str) -> set[str]:
    """The distributions that bring an import name."""
    if name in IMPORT_NAMES:
        return {IMPORT_NAMES[name]}
    return {canonicalize_name(owner) for owner in packages_distributions().get(name, [])}


def imported(module: ast.Module) -> set[str]:
    """Top-level names of every import, wherever it stands."""
    found = {alias.name for node in ast.walk(module) if isinstance(node, ast.Import) for alias in node.names}
    found |= {
        node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }
    return {name.split(".")[0] for name in found}


def scripts_of(*folders: str) -> dict[str, set[str]]:
    """Console script -> distributions that install it, in an environment."""
    owners: dict[str, set[str]] = {}
    for found in distributions(path=list(folders)) if folders else distributions():
        for entry in found.entry_points.select(group="console_scripts"):
            owners.setdefault(entry.name, set()).add(canonicalize_name(found.metadata["Name"]))
    return owners


def our_scripts() -> dict[str, str]:
    return {script: name for name in OURS for script in project(name).get("scripts", {})}


def test_each_script_name_of_ours_has_one_owner_in_the_trainers_environment() -> None:
    owners = scripts_of()
    shared = {script: owners[script] for script in our_scripts() if owners.get(script, set()) - {our_scripts()[script]}}
    assert shared == {}
    names = [script for name in OURS for script in project(name).get("scripts", {})]
    assert len(names) == len(set(names))


def test_each_script_name_of_ours_has_one_owner_in_the_servers_environment() -> None:
    folders = [str(path) for path in SERVER_PACKAGES.glob("python*/site-packages")]
    if not folders:
        pytest.skip("no server was started from this tree yet, so .venvs/server does not exist")
    owners = scripts_of(*folders)
    shared = {script: owners[script] for script in our_scripts() if owners.get(script, set()) - {our_scripts()[script]}}
    assert shared == {}


def test_the_servers_table_names_packages_extras_and_scripts_that_exist() -> None:
    servers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["skyrl"]["servers"]
    assert {"vllm", "reference"} <= set(servers)
    for name, entry in servers.items():
        assert any("{listen}" in part for part in entry["command"]), f"{name}: does not say where to listen"
        owner = our_scripts()[entry["command"][0]]
        if "package" in entry:
            assert entry["package"] == owner, name
            assert set(entry["extras"].values()) <= set(project(owner)["optional-dependencies"]), name


def test_one_lock_and_one_python_for_all() -> None:
    assert [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("packages/*/uv.lock"))] == []
    asked = {name: project(name)["requires-python"] for name in OURS}
    assert set(asked.values()) == {">=3.11,<3.13"}
    assert Path(ROOT / ".python-version").read_text().strip() == "3.11"
