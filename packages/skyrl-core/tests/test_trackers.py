"""Every tracker receives every number; one that fails is named and counted; an unknown one is refused."""

import json
import logging
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.failures import RunFailed
from skyrl.train.trackers import TrackerSet, open_trackers
from skyrl.train.trackers.in_thread import InThread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROWS = [{"step": 1, "idx": 0, "reward": 0.5, "num_turns": 2, "trajectory": "1+1=\n*2*"}]


def cfg(logger: list[str], **trainer: object) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.model_validate({"trainer": {"logger": logger, "project_name": "p", **trainer}})


class Recorder:
    """A tracker that keeps what it gets and, where told so, raises."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed: list[str | None] = []
        self.broken = False

    def log(self, metrics, step):
        if self.broken:
            raise ConnectionError("no route to host")
        self.steps.append((step, dict(metrics)))

    def table(self, name, rows, step):
        self.log({}, step)

    def close(self, error):
        if self.broken:
            raise ConnectionError("no route to host")
        self.closed.append(error)


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def texts(found: EventAccumulator, tag: str) -> list[str]:
    return [e.tensor_proto.string_val[0].decode() for e in found.Tensors(f"{tag}/text_summary")]


def test_several_trackers_get_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    trackers = open_trackers(cfg(["jsonl", "tensorboard"]), tmp_path)
    trackers.log({"reward/avg_raw_reward": 0.25}, 1)
    trackers.log({"reward/avg_raw_reward": 0.5}, 2)
    trackers.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "reward/avg_raw_reward": 0.25}, {"step": 2, "reward/avg_raw_reward": 0.5}]
    scalars = events(tmp_path).Scalars("reward/avg_raw_reward")
    assert [(e.step, e.value) for e in scalars] == [(1, 0.25), (2, 0.5)]


def test_tables_tags_and_the_end_of_a_run_reach_those_that_can_show_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    trackers = open_trackers(cfg(["console", "jsonl", "tensorboard"], tags=["first", "try"]), tmp_path)
    trackers.table("trajectories/train", ROWS, 1)
    trackers.close("Traceback: out of luck")
    assert json.loads((tmp_path / "trajectories/train.jsonl").read_text()) == ROWS[0]
    found = events(tmp_path)
    assert texts(found, "tags") == ["first, try"]
    assert texts(found, "trajectories/train") == ["step 1, idx 0, reward 0.5, num_turns 2\n\n    1+1=\n    *2*"]
    assert texts(found, "error") == ["Traceback: out of luck"]


def test_console_prints_each_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_trackers(cfg(["console"]), tmp_path).log({"b": 2.0, "a": 1.0}, 3)
    assert capsys.readouterr().out == "step 3\n  a: 1\n  b: 2\n"


def test_one_text_is_a_list_of_one_tracker(tmp_path: Path) -> None:
    assert SkyRLTrainConfig.model_validate({"trainer": {"logger": "jsonl"}}).trainer.logger == ("jsonl",)


def test_a_tracker_that_fails_is_named_counted_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    good, flaky = Recorder(), Recorder()
    trackers = TrackerSet({"flaky": flaky, "good": good})
    flaky.broken = True
    trackers.log({"x": 1.0}, 1)
    trackers.table("trajectories/eval", ROWS, 1)
    flaky.broken = False
    trackers.log({"x": 2.0}, 2)
    trackers.close()
    assert [row.get("trainer/num_tracker_failures") for _, row in good.steps] == [1.0, None, 2.0]
    assert flaky.steps == [(2, {"x": 2.0, "trainer/num_tracker_failures": 2.0})]
    told = "tracker flaky did not take the metrics of step 1 (failure 1): ConnectionError: no route to host"
    assert told in caplog.text and "trackers failed 2 times during the run" in caplog.text


def test_metrics_that_no_tracker_took_end_the_run() -> None:
    only = Recorder()
    only.broken = True
    with pytest.raises(RunFailed, match=r"no tracker took the metrics of step 4 \(only: ConnectionError: no route"):
        TrackerSet({"only": only}).log({"x": 1.0}, 4)


def test_a_tracker_that_cannot_be_closed_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    stuck, other = Recorder(), Recorder()
    stuck.broken = True
    TrackerSet({"stuck": stuck, "other": other}).close("it failed")
    assert other.closed == ["it failed"] and "tracker stuck did not take the end of the run" in caplog.text


def test_a_remote_tracker_keeps_nobody_waiting_and_its_error_is_told_next_time() -> None:
    go_on, tried = threading.Event(), threading.Event()

    class Slow(Recorder):
        def log(self, metrics, step):
            assert go_on.wait(10)
            try:
                super().log(metrics, step)
            finally:
                tried.set()

    inner = Slow()
    inner.broken = True
    remote = InThread("slow", inner)
    remote.log({"x": 1.0}, 1)
    assert not tried.is_set()  # the call returned while the tracker still waits
    go_on.set()
    deadline = time.monotonic() + 10
    while remote._errors.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    inner.broken = False
    with pytest.raises(ConnectionError, match="no route to host"):
        remote.log({"x": 2.0}, 2)
    remote.log({"x": 3.0}, 3)
    remote.close(None)
    assert inner.steps == [(2, {"x": 2.0}), (3, {"x": 3.0})] and inner.closed == [None]


def test_a_remote_tracker_that_never_ends_costs_a_deadline() -> None:
    held = threading.Event()
    remote = InThread("held", SimpleNamespace(close=lambda error: held.wait(10)), close_timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"calls were not sent within 0.1 s"):
        remote.close(None)
    held.set()


def test_an_unknown_tracker_names_the_known_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.logger=tensorbord: known: console.*did you mean tensorboard"):
        open_trackers(cfg(["tensorbord"]), tmp_path)


def test_a_tracker_that_cannot_be_opened_is_told_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trainer.logger=jsonl cannot be opened: (NotADirectory|FileExists)Error"):
        open_trackers(cfg(["jsonl"]), tmp_path / "file")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_without_its_client_says_what_to_install(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    with pytest.raises(ValueError, match=rf"needs the {name} client: install skyrl-core\[{name}\]"):
        open_trackers(cfg([name]), tmp_path)


@pytest.mark.ci
def test_mlflow_gets_numbers_tables_tags_and_the_end_in_a_local_store(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # its artifacts go below the folder that it is started in
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    trackers = open_trackers(cfg(["mlflow"], run_name="r", tags=["first"]), tmp_path)
    trackers.table("trajectories/train", ROWS, 1)
    trackers.log({"reward/avg_pass@4": 0.25}, 1)
    trackers.close("it failed")
    from mlflow import MlflowClient  # seconds, which the other tests of this file need not wait

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.data.metrics == {"reward/avg_pass_at_4": 0.25} and "first" in run.data.tags
    assert run.info.status == "FAILED"


@pytest.mark.ci
def test_wandb_writes_a_run_without_an_account(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with caplog.at_level(logging.WARNING):
        trackers = open_trackers(cfg(["wandb"], tags=["first"]), tmp_path)
        trackers.table("trajectories/train", ROWS, 1)
        trackers.log({"reward/avg_raw_reward": 0.25}, 1)
        trackers.close()
    assert trackers.num_failures == 0, caplog.text
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
