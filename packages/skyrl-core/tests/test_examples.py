"""Whether every example does what its head says: the commands that stand there are run, one after the other."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from skyrl.train.entrypoints import main_base
from skyrl_rollout.reference.process import ServedProcess

ROOT = Path(__file__).parents[3]
EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = (
    "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "generator.n_samples_per_prompt=4",
    "trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.hf_save_interval=0", "trainer.logger=jsonl",
    "trainer.progress=false", "trainer.print_example_interval=0",
)  # fmt: skip
TWO_STEPS = ("trainer.max_training_steps=2", "trainer.ckpt_interval=0")
HERE = "127.0.0.1:50051"
pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]


def commands(name: str) -> list[list[str]]:
    """The arguments after `uv run --package skyrl-core` of each command at the head of the file."""
    text = re.sub(r"^# ?", "", (EXAMPLES / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = re.findall(r"^ +uv run --package skyrl-core (.*)$", text, flags=re.MULTILINE)
    return [[word.replace("packages/", f"{ROOT}/packages/") for word in shlex.split(line)] for line in found]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server of the first terminal of endpoint.yaml, at a free port; every example here uses it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    served = [word.replace(HERE, address) for word in commands("endpoint.yaml")[0]]
    with ServedProcess([str(Path(sys.executable).with_name(served[0])), *served[1:]]) as server:
        yield server.url


def run(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a file or a module's main, as the command has them."""
    program, *arguments = command
    assert program == "python"
    if arguments[0] == "-m":
        assert arguments[1] == main_base.__name__
        main_base.main(arguments[2:])
        return
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(arguments[0], run_name="__main__")


def steps(folder: Path) -> list[dict[str, float]]:
    (log,) = folder.glob("runs/*/*/logs/metrics.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def uses_its_reward(rows: list[dict[str, float]]) -> None:
    assert all(0 < row["environment/is_number"] <= 1 for row in rows)


def asks_its_tool(rows: list[dict[str, float]]) -> None:
    assert all(row["environment/tool_calls"] > 0 and row["environment/turns"] > 1 for row in rows)
    assert all(row["generate/avg_num_tokens"] > row["generate/avg_assistant_tokens"] for row in rows)


def goes_on(rows: list[dict[str, float]]) -> None:
    assert [row["trainer/global_step"] for row in rows] == [1, 2, 3, 4]


def two_steps(rows: list[dict[str, float]]) -> None:
    assert [row["trainer/global_step"] for row in rows] == [1, 2]


def two_steps_and_no_ray(rows: list[dict[str, float]]) -> None:
    """What Ray leaves to the threads of a run that has ended ends this process a minute later."""
    two_steps(rows)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("own_data.py", two_steps),
        ("own_reward.py", uses_its_reward),
        ("multi_turn_tool.py", asks_its_tool),
        ("endpoint.yaml", two_steps),
        ("resume.yaml", goes_on),
        ("ray_two_workers.yaml", two_steps_and_no_ray),
    ],
)
def test_the_commands_at_the_head_of_an_example_run(name, shown, url, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = [command for command in commands(name) if command[0] == "python"]
    few = () if name == "resume.yaml" else TWO_STEPS
    for command in written[-2:] if name == "resume.yaml" else written[:1]:
        run([*command, *SMALL, *few, f"generator.inference_engine.external_server_urls={url}"], monkeypatch)
    rows = steps(tmp_path)
    shown(rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)


def test_the_readme_lists_every_example() -> None:
    text = (EXAMPLES.parent / "README.md").read_text()
    listed = re.findall(r"^\| `examples/([^`]+)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.is_file())
