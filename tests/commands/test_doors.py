"""Do all doors of the trainer open, verbatim, in a fresh clone, and lead to the same first rewards?

The first one runs before anything of Arctic is installed in the clone. The rewards come from the reference server,
whose tokens depend on the seed only, and from an environment whose reward varies with them.
"""

import json
from pathlib import Path

import pytest
from fresh_clone import FreshClone

STEPS = 2
OVERRIDES = (
    "@packages/skyrl-core/src/skyrl/train/quickstart/embedded.yaml",
    f"trainer.max_training_steps={STEPS}",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "trainer.hf_save_interval=-1",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "trainer.logger=[jsonl]",
    "environment.env_class=varied_reward",
    "environment.plugins=[varied_reward]",
    "generator.inference_engine.backend=reference",
)
DOORS = {
    "fsdp": "uv run --package skyrl-core python -m skyrl.train.entrypoints.main_base {overrides}",
    "train": "uv run --package skyrl-arctic train {overrides}",
    "flag": "uv run --package skyrl-arctic python -m skyrl.train.entrypoints.main_base "
    "trainer.backend=arctic_rl trainer.arctic_rl={{}} {overrides}",
    "own": "uv run --extra arctic-rl -m arctic_rl.entrypoint {overrides}",
}


@pytest.fixture(scope="module")
def first_rewards() -> dict[str, list[float]]:
    """Door -> mean raw reward of each step, as the tests of this file fill it."""
    return {}


def rewards(log_folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (log_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/avg_raw_reward"] for row in rows if "reward/avg_raw_reward" in row]


def has_arctic(clone: FreshClone) -> bool:
    python = clone.folder / ".venv/bin/python"
    return python.exists() and clone.run(f"{python} -c 'import arctic_rl'", timeout_s=60).code == 0


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("door", DOORS)
def test_a_door_opens_and_gives_the_same_first_rewards(
    clone: FreshClone, tmp_path: Path, first_rewards: dict[str, list[float]], door: str
) -> None:
    arctic_was_there = has_arctic(clone)
    places = [f"trainer.{key}_path={tmp_path}/{key}" for key in ("log", "ckpt", "export")]
    command = DOORS[door].format(overrides=" ".join([*OVERRIDES, *places]))
    clone.run(command, timeout_s=800, PYTHONPATH="tests/seam").ok()
    first_rewards[door] = rewards(tmp_path / "log")
    assert len(first_rewards[door]) == STEPS
    assert len(set(first_rewards[door])) > 1, "the reward must vary, or equal rewards say nothing"
    assert {tuple(values) for values in first_rewards.values()} == {tuple(first_rewards[door])}
    if door == "fsdp" and not arctic_was_there:
        assert not has_arctic(clone), "the default backend must not need or bring Arctic"
    assert clone.leftovers() == []
