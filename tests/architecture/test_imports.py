"""Does every package import only what it may, at the place where it may?

The direction between packages is proven by the import-linter contracts in the root's pyproject.toml; this file has the
rules that a graph of modules cannot express.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT, package_files, shown, tracked_files, tree

# Optional or heavy: the one place that may import it at module scope.
HOMES = {
    "ray": ("packages/skyrl-core/src/skyrl/train/policy/ray_",),
    "deepspeed": ("packages/skyrl-arctic/src/arctic_rl/policy/",),
    "vllm": ("packages/skyrl-arctic-inference/src/skyrl_arctic_inference/engine/",),
    "arctic_inference": ("packages/skyrl-arctic-inference/src/skyrl_arctic_inference/features/",),
    "flash_attn": (),
}
DISTRIBUTIONS = ("skyrl-rollout", "skyrl-core", "skyrl-arctic", "skyrl-arctic-inference")


def module_scope_imports(module: ast.Module) -> set[str]:
    """Top-level names imported when the module is imported; those under `if TYPE_CHECKING` are not."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(module.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    return found


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_optional_library_is_imported_in_its_one_home_only(library: str) -> None:
    elsewhere = [
        shown(path)
        for distribution in DISTRIBUTIONS
        for path in package_files(distribution)
        if library in module_scope_imports(tree(path)) and not shown(path).startswith(HOMES[library])
    ]
    assert elsewhere == []


@pytest.mark.parametrize("distribution", ["skyrl-core", "skyrl-rollout"])
def test_the_core_and_the_seam_name_no_integration(distribution: str) -> None:
    source = ROOT / "packages" / distribution / "src"
    named = [shown(path) for path in tracked_files() if source in path.parents and says_arctic(path)]
    assert named == []


def says_arctic(path: Path) -> bool:
    return "arctic" in path.name.lower() or b"arctic" in path.read_bytes().lower()


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import skyrl_rollout.client, skyrl_rollout.server, skyrl_rollout.weights", ("torch", "transformers", "ray")),
        ("import skyrl.train.config", ("torch", "ray", "deepspeed", "vllm")),
        ("import skyrl.train.trainer", ("ray", "deepspeed", "vllm")),
        ("import skyrl.train.entrypoints.main_base", ("ray", "deepspeed", "vllm")),
        ("import arctic_rl.config", ("deepspeed", "vllm", "ray")),
        ("import skyrl_arctic_inference.cli", ("vllm", "torch")),
    ],
)
def test_importing_it_does_not_load(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}; import sys; print(*(n for n in {absent!r} if n in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == []
