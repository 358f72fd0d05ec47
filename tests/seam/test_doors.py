"""Every door of a user leads to the same run."""

import sys
from pathlib import Path

import pytest
from skyrl_rollout.reference.process import ReferenceServer
from test_backends_agree import FIVE_STEPS
from training_run import EMBEDDED, MAIN_BASE, ROOT, TrainingRun
from vllm_server import TINY_MODEL

ARCTIC = "trainer.backend=arctic_rl"
TRAIN_SCRIPT = (str(Path(sys.executable).with_name("train")),)

DOORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": (MAIN_BASE, ()),
    "plain, fsdp by name": (MAIN_BASE, ("trainer.backend=fsdp",)),
    "plain, flag": (MAIN_BASE, (ARCTIC, "trainer.arctic_rl={}")),
    "plain, older spelling": (MAIN_BASE, ("trainer.override_entrypoint=integrations.arctic_rl.entrypoint",)),
    "the integration's module": (("-m", "arctic_rl.entrypoint"), ()),
    "train": (TRAIN_SCRIPT, ()),
}


def two_steps(folder: Path, door: str, url: str) -> TrainingRun:
    entrypoint, flags = DOORS[door]
    run = TrainingRun(
        folder,
        *FIVE_STEPS,
        "trainer.max_training_steps=2",
        f"generator.inference_engine.external_server_urls=[{url}]",
        *flags,
        entrypoint=entrypoint,
        base=EMBEDDED,
    )
    code = run.start(PYTHONPATH=str(ROOT / "tests/seam")).wait(200)
    assert code == 0, run.output[-4000:]
    return run


@pytest.mark.long  # tests/commands/test_doors.py opens the main ones in CI, from a fresh clone
@pytest.mark.timeout(600)
def test_all_doors_give_the_same_first_rewards(tmp_path: Path) -> None:
    with ReferenceServer("--model", str(TINY_MODEL)) as server:
        rewards = {d: two_steps(tmp_path / str(i), d, server.url).rewards() for i, d in enumerate(DOORS)}
    first = rewards["plain"]
    assert len(first) == 2 and first[0] > 0
    assert rewards == dict.fromkeys(DOORS, first)
