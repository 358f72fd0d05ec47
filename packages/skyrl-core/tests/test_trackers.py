"""Every tracker receives every number; an unknown one is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from skyrl.train.trackers import open_trackers


def cfg(logger: list[str]) -> SimpleNamespace:
    return SimpleNamespace(trainer=SimpleNamespace(logger=logger, project_name="p", run_name="r"))


def test_several_trackers_get_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    trackers = open_trackers(cfg(["jsonl", "tensorboard"]), tmp_path)
    trackers.log({"reward/avg_raw_reward": 0.25}, 1)
    trackers.log({"reward/avg_raw_reward": 0.5}, 2)
    trackers.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "reward/avg_raw_reward": 0.25}, {"step": 2, "reward/avg_raw_reward": 0.5}]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/avg_raw_reward")] == [(1, 0.25), (2, 0.5)]


def test_console_prints_each_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_trackers(cfg(["console"]), tmp_path).log({"b": 2.0, "a": 1.0}, 3)
    assert capsys.readouterr().out == "step 3\n  a: 1\n  b: 2\n"


def test_an_unknown_tracker_names_the_known_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.logger=tensorbord: known: console.*did you mean tensorboard"):
        open_trackers(cfg(["tensorbord"]), tmp_path)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_without_its_client_says_what_to_install(tmp_path: Path, name: str) -> None:
    try:
        __import__(name)
    except ImportError:
        with pytest.raises(ValueError, match=f"needs the {name} client"):
            open_trackers(cfg([name]), tmp_path)
