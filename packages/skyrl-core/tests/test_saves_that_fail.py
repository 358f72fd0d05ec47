"""A save that is killed, or that finds no room, loses nothing: the last whole checkpoint is there and loads."""

from __future__ import annotations

import multiprocessing
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from saves_forever import config, resume, save, save_forever
from skyrl.train.checkpoints import CheckpointStore, replace_folder
from skyrl.train.policy.contract_suite import tiny_model
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.group import PolicyGroup

DEADLINE_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


@pytest.fixture
def group(model: Path) -> Iterator[PolicyGroup]:
    group = PolicyGroup.create(config(model), PLUGIN, "policy", total_steps=10)
    yield group
    group.close()


def wait_until(done: Callable[[], bool], process: multiprocessing.process.BaseProcess) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert process.is_alive(), f"ended with {process.exitcode}"
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s"


def files_in_the_making(folder: Path) -> int:
    """How many files the checkpoint has that is being written; -1: none is."""
    found = list(folder.glob(".global_step_*.partial"))
    return sum(path.is_file() for path in found[0].rglob("*")) if found else -1


@pytest.mark.ci
def test_a_kill_in_the_middle_of_a_save_leaves_the_last_whole_checkpoint(
    tmp_path: Path, model: Path, group: PolicyGroup
) -> None:
    spawner = multiprocessing.get_context("forkserver")
    spawner.set_forkserver_preload(["saves_forever", "skyrl.train.policy.fsdp.backend"])
    folder, steps, interrupted = tmp_path / "run", [0], 0
    store = CheckpointStore(folder)
    for files in (0, 1, 3, 5):
        process = spawner.Process(target=save_forever, args=(folder, model), daemon=True)
        process.start()
        wait_until(lambda: max(store.steps(), default=0) > steps[-1], process)
        wait_until(lambda files=files: files_in_the_making(folder) >= files, process)  # type: ignore[misc]
        process.kill()
        process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL, "it was still saving: nothing that it resumed from was damaged"
        interrupted += files_in_the_making(folder) >= 0
        steps.append(resume(store, group))
    assert steps == sorted(set(steps)), "every process went on from where the last one was killed"
    assert interrupted >= 2, "most of them were killed inside a save"
    assert files_in_the_making(folder) == -1, "what was half written is gone"


@contextmanager
def small_file_system(folder: Path, size_kib: int) -> Iterator[None]:
    """`folder` on a file system of that size; where none may be mounted, files of at most that size."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mounted.returncode:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_kib << 9, limits[1]))
    try:
        yield
    finally:
        if mounted.returncode:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        else:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_the_last_whole_checkpoint_stays(tmp_path: Path, group: PolicyGroup) -> None:
    save(CheckpointStore(tmp_path / "probe"), group, 1)
    size_kib = sum(path.stat().st_size for path in (tmp_path / "probe").rglob("*")) >> 10
    folder = tmp_path / "disk"
    with small_file_system(folder, int(size_kib * 1.5)):
        store = CheckpointStore(folder / "ckpts")
        first = save(store, group, 1)
        told = rf"{re.escape(str(store.path(2)))} could not be written, [\d.]+ MB are free there: .*rank 0: .*"
        with pytest.raises(OSError, match=told):
            save(store, group, 2)
        assert store.latest() == first and resume(store, group) == 1
        assert sorted(path.name for path in store.folder.iterdir()) == ["global_step_1", "latest_ckpt_global_step.txt"]
        with pytest.raises(OSError, match=r"policy could not be written, [\d.]+ MB are free there"):
            replace_folder(folder / "exports/global_step_2/policy", lambda part: fill(part, size_kib))
        assert list((folder / "exports/global_step_2").iterdir()) == []


def fill(folder: Path, size_kib: int) -> None:
    (folder / "model.safetensors").write_bytes(bytes(size_kib << 10))


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path, group: PolicyGroup) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))):
        save(CheckpointStore(tmp_path / "file/ckpts"), group, 1)
