"""Which folders a run writes into: made, written to and taken before anything is started, and by no other run."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

IN_USE = ".in-use"
PROBE_BYTES = 4096  # less than this may fit into a file system that is full


@contextmanager
def held(cfg: Any) -> Iterator[None]:
    """The run's folders are this process's while it is open; killed or not, its end gives them back.

    ValueError names the key of a folder that cannot be written to, or that another run writes into.
    """
    with ExitStack() as stack:
        taken: set[Path] = set()
        for key, folder in used(cfg).items():
            if folder.resolve() not in taken:
                stack.enter_context(_held(key, folder))
                taken.add(folder.resolve())
        yield


def used(cfg: Any) -> dict[str, Path]:
    """Key -> folder, for those that something will be written into."""
    trainer = cfg.trainer
    out = {"trainer.log_path": trainer.log_folder}
    generates_only = trainer.mode == "generate"
    if trainer.ckpt_interval > 0 and not generates_only:
        out["trainer.ckpt_path"] = Path(trainer.ckpt_path)
    evaluates = bool(cfg.data.val_data) and (trainer.eval_interval > 0 or trainer.eval_before_train or generates_only)
    trains = not generates_only and (trainer.hf_save_interval > 0 or trainer.dump_data_batch)
    if trains or (trainer.dump_eval_results and evaluates):
        out["trainer.export_path"] = Path(trainer.export_path)
    return out


@contextmanager
def _held(key: str, folder: Path) -> Iterator[None]:
    path = folder / IN_USE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise ValueError(f"{key}={folder}: cannot be written to: {error.strerror}") from error
    with file:
        _lock(file.fileno(), path, key)
        _sign(file.fileno(), key, folder)
        yield  # the file stays: another run may be about to lock it


def _lock(descriptor: int, path: Path, key: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = path.read_text(errors="replace").strip() or "another process"
        raise ValueError(
            f"{key}={path.parent}: another run writes into it ({holder}): wait for its end, or give this run another "
            f"trainer.run_name or {key}"
        ) from None
    except OSError as error:  # a network file system without locks
        log.warning("%s cannot be locked (%s): take care that no other run writes into it", path.parent, error.strerror)


def _sign(descriptor: int, key: str, folder: Path) -> None:
    """Says who holds it, and proves that there is room."""
    text = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, text.ljust(PROBE_BYTES).encode())
        os.fsync(descriptor)
    except OSError as error:
        raise ValueError(f"{key}={folder}: cannot be written to: {error.strerror}") from error
