"""A checkpoint is whole or absent, belongs to one run, and is found again."""

from pathlib import Path

import pytest
from skyrl.train.checkpoints import MARKER, CheckpointStore, changed_settings, find_resume, read_state, require_same_run
from skyrl.train.config import SkyRLTrainConfig


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(
        step,
        write=lambda folder: (folder / "weights").write_text(f"weights of {step}"),
        state={"train_loader": {"cursor": step}, "rows": []},
        config_yaml="trainer: {}\n",
    )


def test_the_last_saved_step_is_the_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    save(store, 2)
    folder = save(store, 10)
    assert store.latest() == folder
    assert read_state(folder) == {"global_step": 10, "train_loader": {"cursor": 10}, "rows": []}
    assert (folder / "config.yaml").read_text() == "trainer: {}\n"
    assert store.steps() == [2, 10]


def test_a_save_that_dies_half_way_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    first = save(store, 1)

    def dies(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match=r"global_step_2 could not be written, .* MB are free there: disk full"):
        store.save(2, write=dies, state={}, config_yaml="")
    assert [path.name for path in store.folder.iterdir() if "partial" in path.name] == []
    assert store.latest() == first
    assert store.steps() == [1]
    save(store, 2)
    assert (store.path(2) / "weights").read_text() == "weights of 2"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert store.steps() == [3, 4]


def test_a_run_resumed_at_an_earlier_step_keeps_what_it_saves_and_what_was_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep=1)
    for step in (50, 2, 3):
        save(store, step)
    assert store.steps() == [3, 50]
    assert store.latest() == store.path(3)


def test_a_run_that_died_before_it_named_its_checkpoint_is_resumed_from_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    save(store, 2)
    (store.folder / MARKER).unlink()
    assert store.latest() == store.path(2)


def test_a_fresh_run_sets_another_runs_checkpoints_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    save(store, 7).rename(store.folder / ".global_step_7.replaced")  # by a save that was killed
    (store.folder / ".global_step_8.partial").mkdir()
    aside = store.set_aside()
    assert aside is not None and (aside / "global_step_7" / "weights").read_text() == "weights of 7"
    assert list(store.folder.iterdir()) == []
    assert store.latest() is None
    assert store.set_aside() is None


def test_resume_modes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    assert find_resume(store, mode="latest", resume_path=None) is None
    folder = save(store, 3)
    assert find_resume(store, mode=None, resume_path=None) is None
    assert find_resume(store, mode="none", resume_path=None) is None
    assert find_resume(store, mode="latest", resume_path=None) == folder
    assert find_resume(store, mode="from_path", resume_path=str(folder)) == folder
    with pytest.raises(ValueError, match="trainer.resume_path"):
        find_resume(store, mode="from_path", resume_path=None)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        find_resume(store, mode="from_path", resume_path=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("text", ["", "seven"])
def test_a_damaged_marker_is_named(tmp_path: Path, text: str) -> None:
    store = CheckpointStore(tmp_path / "run")
    save(store, 3)
    (store.folder / MARKER).write_text(text)
    with pytest.raises(ValueError, match=MARKER):
        store.latest()


@pytest.mark.parametrize("content", [b'{"global_step": 3', b"{}", b"[]", b"3", b"\xff\xfe"])
def test_a_damaged_state_is_named(tmp_path: Path, content: bytes) -> None:
    folder = save(CheckpointStore(tmp_path / "run"), 3)
    path = folder / "trainer_state.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        read_state(folder)


def test_what_changed_since_a_checkpoint_is_told(tmp_path: Path) -> None:
    there = SkyRLTrainConfig()
    folder = CheckpointStore(tmp_path).save(3, write=lambda folder: None, state={}, config_yaml=there.to_yaml())
    changes = {"epochs": 7, "resume_mode": "latest"}
    here = SkyRLTrainConfig.model_validate({"trainer": changes})
    assert changed_settings(folder, here.to_yaml()) == {"trainer.epochs": "1 -> 7"}
    assert changed_settings(folder, there.to_yaml()) == {}
    require_same_run(folder, changed_settings(folder, here.to_yaml()))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"run_name": "b"}, r"trainer.run_name \(test_run -> b\)"),
        ({"policy": {"model": {"path": "other/model"}}}, r"trainer.policy.model.path \(.* -> other/model\)"),
    ],
)
def test_another_runs_checkpoint_is_not_gone_on_with_by_accident(tmp_path: Path, other: dict, told: str) -> None:
    there = SkyRLTrainConfig()
    folder = CheckpointStore(tmp_path).save(3, write=lambda folder: None, state={}, config_yaml=there.to_yaml())
    changed = changed_settings(folder, SkyRLTrainConfig.model_validate({"trainer": other}).to_yaml())
    with pytest.raises(ValueError, match=f"another run: .*{told}.*trainer.resume_path={folder}"):
        require_same_run(folder, changed)


def test_a_damaged_configuration_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(3, write=lambda folder: None, state={}, config_yaml="a: {")
    with pytest.raises(ValueError, match=f"{folder / 'config.yaml'} is damaged"):
        changed_settings(folder, SkyRLTrainConfig().to_yaml())


def test_a_save_that_is_killed_while_it_replaces_a_checkpoint_leaves_one_of_the_two(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    folder = save(store, 2)
    folder.rename(store.folder / ".global_step_2.replaced")  # killed here
    (store.folder / ".global_step_2.partial").mkdir()
    (store.folder / ".global_step_1.dropped").mkdir()
    assert find_resume(store, mode="latest", resume_path=None) == folder
    assert (folder / "weights").read_text() == "weights of 2"
    assert sorted(path.name for path in store.folder.iterdir()) == ["global_step_2", MARKER]
