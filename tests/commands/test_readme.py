"""Does every shell block of README.md do what it says, verbatim, in a fresh clone?"""

import contextlib

import pytest
from fresh_clone import ROOT, FreshClone
from readme_scenes import Scene, scenes

SCENES = scenes(ROOT / "README.md")
CHECK_COMMAND = "uv run tools/check.py"
START_COMMAND = "pip install uv && uv run --package skyrl-arctic train"
READY = "ready url="


def parameters() -> list[object]:
    """One per block. The default run is in the long tier: tests/seam/test_learning.py trains the same hundred steps."""
    return [
        pytest.param(scene, id=f"block {number}", marks=[pytest.mark.long] if scene.command == START_COMMAND else [])
        for number, scene in enumerate(SCENES, start=1)
    ]


def test_the_test_command_of_the_readme_is_the_one_that_ci_and_contributors_run() -> None:
    assert CHECK_COMMAND in [scene.command for scene in SCENES]
    assert f"exec {CHECK_COMMAND} " in (ROOT / ".ci/run").read_text()
    assert CHECK_COMMAND in [scene.command for scene in scenes(ROOT / "CONTRIBUTING.md")]


def test_the_readme_shows_how_to_start_and_how_to_swap_the_server() -> None:
    assert START_COMMAND in [scene.command for scene in SCENES]
    assert any(scene.background for scene in SCENES)


@pytest.mark.ci
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scene", parameters())
def test_a_block_runs_in_a_fresh_clone(clone: FreshClone, scene: Scene) -> None:
    if scene.command == CHECK_COMMAND:
        # This test is part of that very command: here only its table, so that it does not run inside itself.
        assert "tests" in clone.run(f"{CHECK_COMMAND} --list", timeout_s=600).ok().output
        return
    with contextlib.ExitStack() as meanwhile:
        for command in scene.background:
            meanwhile.enter_context(clone.background(command, until=READY, timeout_s=600))
        clone.run(scene.command, timeout_s=900).ok()
    assert clone.leftovers() == []
