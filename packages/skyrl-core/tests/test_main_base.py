"""The plain entrypoint as a user runs it: exit codes, messages, Ctrl-C in every phase, nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import skyrl.train.quickstart
from transformers import AutoModelForCausalLM

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent
MODULE = [sys.executable, "-m", "skyrl.train.entrypoints.main_base"]
ENGINE = "generator.inference_engine"
EMBEDDED = [
    f"@{QUICKSTART / 'embedded.yaml'}", "generator.inference_engine.backend=reference", "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4", "trainer.eval_before_train=false", "trainer.eval_interval=0",
    "trainer.hf_save_interval=0", "trainer.logger=jsonl",
]  # fmt: skip


class Run:
    """The command in a folder of its own, with its output in a file."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.folder = folder
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "output.txt").open("wb") as sink:
            self.process = subprocess.Popen(
                [*MODULE, *argv], cwd=folder, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=environ,
                start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def code(self, timeout_s: float = 120.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output[-3000:]}") from None

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output[-3000:]}"
            if time.monotonic() > deadline:
                self.process.kill()  # a run that goes on would slow every test after this one
                raise AssertionError(f"no {text!r} within {timeout_s} s:\n{self.output[-3000:]}")
            time.sleep(0.02)

    def left_running(self, timeout_s: float = 15.0) -> list[psutil.Process]:
        """Processes that were started from the run's folder and still live."""

        def alive() -> list[psutil.Process]:
            found = []
            for process in psutil.process_iter():
                try:
                    if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
                except psutil.Error:
                    continue
            return found

        deadline = time.monotonic() + timeout_s
        while alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive()


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["trainer.epoch=3"], 2, "trainer.epoch: unknown key; did you mean trainer.epochs?"),
        (["trainer.backend=nope"], 2, "no such backend is installed; known:"),
        (["trainer.policy.model.path=/nope"], 2, "trainer.policy.model.path=/nope: no such folder"),
        pytest.param([*EMBEDDED, "data.train_data=/nope.parquet"], 1, "/nope.parquet", marks=pytest.mark.ci),
        ([*EMBEDDED, f"{ENGINE}.backend=vlm"], 2, "no such server"),
        pytest.param(
            [*EMBEDDED, f"{ENGINE}.server_command='false {{listen}}'"], 1, "died while it started", marks=pytest.mark.ci
        ),
    ],
)
def test_what_a_user_can_mend_is_one_clear_block(tmp_path: Path, argv: list[str], code: int, told: str) -> None:
    run = Run(tmp_path, *argv)
    assert run.code() == code, run.output
    assert told in run.output
    assert "Traceback" not in run.output
    assert run.left_running() == []


def test_help_teaches_the_grammar_and_finds_keys(tmp_path: Path) -> None:
    run = Run(tmp_path, "--help")
    assert run.code() == 0
    for text in ("@run.yaml", "external_server_urls=['grpc://", "trainer.policy.optimizer_config.lr = 1e-06", "fsdp"):
        assert text in run.output
    few = tmp_path / "few"
    few.mkdir()
    run = Run(few, "--help", "warmup")
    assert run.code() == 0
    assert "num_warmup_steps" in run.output
    assert "train_data" not in run.output


@pytest.mark.ci
def test_a_run_leaves_its_table_nothing_running_and_a_configuration_that_runs_again(tmp_path: Path) -> None:
    shown = ("trainer.hf_save_interval=2", "trainer.logger=['jsonl','tensorboard']")
    run = Run(tmp_path, *EMBEDDED, "trainer.max_training_steps=2", *shown)
    assert run.code() == 0, run.output
    assert "trainer/global_step: 2" in run.output
    assert run.left_running() == []
    left = tmp_path / "runs/quickstart/arithmetic"
    assert (left / "logs/reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((left / "logs/tensorboard").iterdir())
    assert AutoModelForCausalLM.from_pretrained(left / "exports/global_step_2/policy").num_parameters() > 0
    saved = left / "ckpts/global_step_2/config.yaml"
    again = Run(tmp_path, f"@{saved}", "trainer.run_name=again", "trainer.max_training_steps=1")
    assert again.code() == 0, again.output
    assert list(tmp_path.glob("runs/quickstart/again/ckpts/global_step_1"))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("phase", "number", "code"),
    [
        ("keys honoured", signal.SIGINT, 130),
        ("starting server", signal.SIGINT, 130),
        ("step 1/", signal.SIGINT, 130),
        ("step 3/", signal.SIGTERM, 143),
    ],
)
def test_ctrl_c_ends_everything_in_every_phase(tmp_path: Path, phase: str, number: signal.Signals, code: int) -> None:
    run = Run(tmp_path, *EMBEDDED, "trainer.max_training_steps=500", "trainer.epochs=100", "trainer.ckpt_interval=2")
    run.wait_for(phase)
    run.process.send_signal(number)
    assert run.code(60) == code, run.output
    assert "Traceback" not in run.output
    goes_on = "/ckpts/global_step_2; trainer.resume_mode=latest goes on from it" in run.output
    assert goes_on == (phase == "step 3/"), run.output
    assert run.left_running() == []


@pytest.mark.ci
@pytest.mark.parametrize(
    "mode",
    [
        ("trainer.mode=one_step_off",),
        (
            "trainer.fully_async.enabled=true", "trainer.fully_async.num_parallel_generation_workers=8",
            "trainer.algorithm.policy_loss_type=rollout_is",
        ),
    ],
    ids=["one_step_off", "fully_async"],
)  # fmt: skip
def test_ctrl_c_ends_rollouts_that_are_ahead_of_training(tmp_path: Path, mode: tuple[str, ...]) -> None:
    run = Run(tmp_path, *EMBEDDED, "trainer.max_training_steps=500", "trainer.epochs=100", *mode)
    run.wait_for("step 3/")
    run.process.send_signal(signal.SIGINT)
    assert run.code(60) == 130, run.output
    assert "Traceback" not in run.output and "never retrieved" not in run.output
    assert run.left_running() == []


@pytest.mark.ci
def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    run = Run(tmp_path, *EMBEDDED, "trainer.max_training_steps=500", "trainer.epochs=100")
    run.wait_for("step 1/")
    run.process.kill()
    run.process.wait()
    assert run.left_running() == []


@pytest.mark.ci
def test_a_server_that_dies_during_the_run_ends_it_with_its_last_lines(tmp_path: Path) -> None:
    run = Run(tmp_path, *EMBEDDED, "trainer.max_training_steps=500", "trainer.epochs=100")
    run.wait_for("step 1/")
    for child in psutil.Process(run.process.pid).children():
        if "reference" in child.cmdline():
            child.kill()
    assert run.code(60) == 1, run.output
    assert "died during the run" in run.output
    assert "Traceback" not in run.output
    assert run.left_running() == []
