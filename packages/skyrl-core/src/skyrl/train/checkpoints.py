"""Which checkpoint of a run is whole, where it lies, and how a run finds the one to go on from.

A checkpoint is a folder `global_step_N`, written beside its final name and renamed when complete;
`latest_ckpt_global_step.txt` names the last one and is replaced after it. A killed run therefore leaves either the old
checkpoint or the new one, never half of one; names with a dot in front are what it was in the middle of.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

MARKER = "latest_ckpt_global_step.txt"
STATE = "trainer_state.json"
NEEDED = ("global_step", "train_loader", "rows")
CONFIG = "config.yaml"
# Whose checkpoints they are: `latest` goes on with these only.
IDENTITY = ("trainer.project_name", "trainer.run_name", "trainer.policy.model.path")
# With less room than this on its disk, a write that failed has failed for want of it.
FULL_BYTES = 16 << 20
PARTIAL, REPLACED, DROPPED = ".partial", ".replaced", ".dropped"
_STEP = re.compile(r"^global_step_(\d+)$")


class CheckpointStore:
    """The checkpoints of one run under `folder`; `keep` newest are kept (-1: all)."""

    def __init__(self, folder: Path, *, keep: int = -1) -> None:
        self.folder, self._keep = folder, keep

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.match(p.name) for p in self.folder.iterdir() if (p / STATE).is_file())
        return sorted(int(m.group(1)) for m in found if m)

    def path(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    def save(self, step: int, *, write: Callable[[Path], None], state: dict[str, Any], config_yaml: str) -> Path:
        """`write` fills the folder with the workers' files; the trainer's own state goes in last."""

        def fill(staging: Path) -> None:
            write(staging)
            (staging / CONFIG).write_text(config_yaml, encoding="utf-8")
            _write_synced(staging / STATE, json.dumps({"global_step": step, **state}, indent=1))

        final = replace_folder(self.path(step), fill)
        _write_synced(self.folder / f".{MARKER}", str(step))
        os.replace(self.folder / f".{MARKER}", self.folder / MARKER)
        _sync_folder(self.folder)
        self._drop_older_than(step)
        return final

    def latest(self) -> Path | None:
        """The checkpoint that the marker names, the newest where a run died before it wrote one, or None for a folder
        without any. ValueError when it is damaged."""
        marker = self.folder / MARKER
        if not marker.is_file():
            steps = self.steps()
            return self.path(steps[-1]) if steps else None
        text = marker.read_text(encoding="utf-8").strip()
        if not text.isdigit():
            raise ValueError(
                f"{marker} holds {text!r}, expected a step number: write the number of a whole "
                f"global_step_N folder into it (found: {self.steps() or 'none'})"
            )
        return require_checkpoint(self.path(int(text)))

    def set_aside(self) -> Path | None:
        """Moves another run's checkpoints to a folder beside this one: a fresh run neither mixes with them nor loses
        them. OSError says what to do where they cannot be moved, as out of a mounted folder."""
        self.tidy()
        if not self.steps() and not (self.folder / MARKER).exists():
            return None
        aside = self.folder.with_name(f"{self.folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            aside.mkdir()
            # the marker first: without it the newest checkpoint that is left counts
            for path in sorted(self.folder.glob("[!.]*"), key=lambda path: path.name != MARKER):
                os.replace(path, aside / path.name)
        except OSError as error:
            raise OSError(
                f"{self.folder} holds another run's checkpoints, which cannot be moved to {aside} ({error.strerror}): "
                f"give another trainer.ckpt_path, or go on with them with trainer.resume_mode=latest"
            ) from error
        return aside

    def _drop_older_than(self, step: int) -> None:
        """Later steps are there where a run was resumed at an earlier one: they are not this run's to drop."""
        if self._keep < 0:
            return
        for old in [s for s in self.steps() if s <= step][: -self._keep]:
            _remove(self.path(old))

    def tidy(self) -> None:
        """Ends what a killed run was in the middle of: half-written folders go, one about to be replaced comes back."""
        for path in self.folder.glob(".global_step_*") if self.folder.is_dir() else ():
            if path.name.endswith(REPLACED):
                _put_back(path)
            elif path.name.endswith((PARTIAL, DROPPED)):
                shutil.rmtree(path, ignore_errors=True)


def find_resume(store: CheckpointStore, *, mode: str | None, resume_path: str | None) -> Path | None:
    """The checkpoint that `trainer.resume_mode` asks for: none, latest (of this run's folder) or from_path."""
    if mode in (None, "none"):
        return None
    if mode == "latest":
        store.tidy()
        return store.latest()
    if not resume_path:
        raise ValueError("trainer.resume_mode=from_path needs trainer.resume_path=<.../global_step_N>")
    return require_checkpoint(Path(resume_path).expanduser())


def require_checkpoint(folder: Path) -> Path:
    """`folder` if it holds a whole checkpoint. ValueError says what is missing."""
    if not (folder / STATE).is_file():
        raise ValueError(f"{folder} is no whole checkpoint: expected a folder global_step_N with {STATE} in it")
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's own state of a checkpoint. ValueError when the file is damaged."""
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in NEEDED if name not in state]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): resume from another global_step_N folder") from None
    if missing:
        raise ValueError(f"{path} is damaged (no {', '.join(missing)}): resume from another global_step_N folder")
    return state


def state_of_mode(state: dict[str, Any], mode: str) -> dict[str, Any]:
    """What the run's source of rollouts left in `state`. ValueError where another mode left rollouts that `mode` does
    not know."""
    there = state.get("mode", "plain")
    if there not in (mode, "plain"):
        raise ValueError(
            f"trainer.mode={mode}: the checkpoint is of a run with trainer.mode={there}, whose rollouts ahead of "
            f"training would be lost: resume with that mode"
        )
    return state.get("source", {})


def changed_settings(folder: Path, config_yaml: str) -> dict[str, str]:
    """Key -> "there -> here" for each key whose value in the checkpoint is not the one in `config_yaml`."""
    path = folder / CONFIG
    try:
        there = _leaves(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): resume from another global_step_N folder") from None
    here = _leaves(yaml.safe_load(config_yaml))
    return {
        key: f"{there[key]} -> {here.get(key)}"
        for key in there
        if there[key] != here.get(key) and not key.startswith("trainer.resume_")
    }


def require_same_run(folder: Path, changed: Mapping[str, str]) -> None:
    """ValueError where the checkpoint in `folder` is another run's; `changed` as `changed_settings` found it."""
    if others := [f"{key} ({changed[key]})" for key in IDENTITY if key in changed]:
        raise ValueError(
            f"{folder} is the checkpoint of another run: {', '.join(others)}: give this run another trainer.ckpt_path, "
            f"or go on from it on purpose with trainer.resume_mode=from_path trainer.resume_path={folder}"
        )


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {key: value for name, part in tree.items() for key, value in _leaves(part, f"{prefix}{name}.").items()}


def replace_folder(final: Path, write: Callable[[Path], None]) -> Path:
    """`write` fills a folder beside `final`, which takes its place only when complete.

    OSError, with the room that is left, where the disk is to blame; nothing half-written stays.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging, replaced = (final.with_name(f".{final.name}{end}") for end in (PARTIAL, REPLACED))
    if replaced.exists():
        _put_back(replaced)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        write(staging)
        _sync_files(staging)
    except Exception as error:
        free = shutil.disk_usage(staging).free
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) or free < FULL_BYTES:  # torch and safetensors have errors of their own for it
            raise OSError(f"{final} could not be written, {free / 1e6:.1f} MB are free there: {error}") from error
        raise
    if final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _put_back(replaced: Path) -> None:
    """`replaced` under its own name again, unless its successor has that already."""
    final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(REPLACED))
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(replaced, final)


def _remove(folder: Path) -> None:
    """Takes the name away first: a folder that is half removed must not look like a checkpoint."""
    dropped = folder.with_name(f".{folder.name}{DROPPED}")
    shutil.rmtree(dropped, ignore_errors=True)
    os.rename(folder, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """What is in it is on the disk before its name is."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file, contextlib.suppress(OSError):
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """The names in it are on the disk when this returns, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
