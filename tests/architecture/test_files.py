"""Is every file small, named for what is in it, and opened by a sentence that says what it answers?"""

import ast
import re

from sources import ROOT, python_files, shown, tracked_files, tree

HARD_LIMIT_LINES = 500
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|misc|managers?)(_|$)")
TOP_LEVEL = {
    ".ci", ".gitignore", ".python-version", "ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE", "README.md",
    "packages", "protos", "pyproject.toml", "tests", "tools", "uv.lock",
}  # fmt: skip


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > HARD_LIMIT_LINES} == {}


def test_every_file_opens_with_a_sentence() -> None:
    assert [shown(path) for path in python_files() if not opens_with_a_sentence(tree(path))] == []


def opens_with_a_sentence(module: ast.Module) -> bool:
    """An empty file says nothing and needs no sentence."""
    if not module.body:
        return True
    doc = ast.get_docstring(module) or ""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return bool(re.search(r"[.?!:]$", paragraph))


def test_no_file_is_named_for_a_drawer() -> None:
    names = [path.relative_to(ROOT) for path in python_files()]
    assert [
        str(name) for name in names if any(FORBIDDEN_NAMES.search(part) for part in name.with_suffix("").parts)
    ] == []


def test_the_top_level_holds_what_the_design_names_and_nothing_else() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked_files()} - TOP_LEVEL == set()


def test_every_package_has_the_same_front() -> None:
    packages = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
    missing = [shown(package / name) for package in packages for name in ("README.md", "LICENSE", "src", "tests")
               if not (package / name).exists()]  # fmt: skip
    assert missing == []


def test_every_package_carries_the_one_license() -> None:
    """A copy: a link would leave the source distribution."""
    whole = (ROOT / "LICENSE").read_text()
    assert [shown(copy) for copy in (ROOT / "packages").glob("*/LICENSE") if copy.read_text() != whole] == []
