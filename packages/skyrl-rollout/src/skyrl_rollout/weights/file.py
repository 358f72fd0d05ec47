"""Weights in files that both sides see: a folder made, filled and removed by the trainer, read once by a server."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from skyrl_rollout.weights.owners import boot_id, is_gone, owner_tag

PREFIX = "skyrl-update"
_OWN_NAME = re.compile(rf"{PREFIX}\.([0-9a-f-]+)\.(\d+\.\d+\.\d+)\.[0-9a-f]{{32}}")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that nobody writes to would wait for ever
_SHARD_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def shard_name(shard: int) -> str:
    """The file of one shard inside the folder."""
    return f"shard-{shard}.bin"


class UpdateFolder:
    """A folder of this process's making below `root`: `uri` names it on the wire, `close` removes it (also at exit)."""

    def __init__(self, root: Path) -> None:
        """Removes what ended processes of this machine left there. Raises OSError where no folder can be made."""
        remove_stale(root)
        self.path = root.absolute() / f"{PREFIX}.{boot_id()}.{owner_tag()}.{secrets.token_hex(16)}"
        self.path.mkdir(mode=0o700)
        self._remove = weakref.finalize(self, _remove_own, self.path, os.getpid())

    @property
    def uri(self) -> str:
        """ "file:///abs/folder"."""
        return self.path.as_uri()

    def write(self, shard: int, data: bytes | memoryview) -> None:
        """Writes one shard, over what stood there, and returns when it has reached the disk. Raises OSError, saying
        what is needed, when there is too little room."""
        path = self.path / shard_name(shard)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with memoryview(data).cast("B") as view:
                _take_room(fd, path, len(view))
                done = 0
                while done < len(view):
                    done += os.pwrite(fd, view[done:], done)
                os.ftruncate(fd, len(view))
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync_folder(self.path)

    def close(self) -> None:
        """Removes the folder and its files. A forked child leaves them alone."""
        self._remove()


def remove_stale(root: Path) -> list[Path]:
    """Removes the folders whose owner, a process of this machine, PID namespace and user, is dead; returns them."""
    removed = []
    for path in root.glob(f"{PREFIX}.*"):
        match = _OWN_NAME.fullmatch(path.name)
        if match is None or match[1] != boot_id() or not is_gone(match[2]):
            continue
        with contextlib.suppress(FileNotFoundError):  # another trainer removed it at the same moment
            if path.lstat().st_uid == os.geteuid() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def folder_below(uri: str, root: Path) -> tuple[str, ...]:
    """The names that lead from `root` to the folder of `uri`. Raises ValueError for anything that is not a plain folder
    path below it; nothing is opened."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise ValueError(f"{uri!r} is not of the form file:///absolute/folder")
    path = Path(unquote(parts.path))
    if not path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise ValueError(f"{uri!r} is not an absolute path without '..'")
    if not path.is_relative_to(root) or path == root:
        raise ValueError(f"{path} is not a folder below {root}, the only place that this server takes weights from")
    return path.relative_to(root).parts


def open_shard(root: Path, folder: Sequence[str], shard: int, nbytes: int) -> int:
    """A descriptor of one shard's file, to read `nbytes` of. No name below `root` may be a link.

    Raises ValueError for a link, for what is no plain file and for one that is too short; FileNotFoundError when there
    is none.
    """
    name = shard_name(shard)
    where = root.joinpath(*folder) / name
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folder:
            below = os.open(part, _FOLDER_FLAGS, dir_fd=at)
            os.close(at)
            at = below
        fd = os.open(name, _SHARD_FLAGS, dir_fd=at)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {where}: write every shard before PullUpdate") from None
    except OSError as error:
        raise ValueError(f"{where} cannot be opened (links are not followed): {error.strerror}") from None
    finally:
        os.close(at)
    return checked(fd, str(where), nbytes)


def checked(fd: int, what: str, nbytes: int) -> int:
    """`fd` when it is a plain file of at least `nbytes`; else it is closed. Raises ValueError."""
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_size >= nbytes:
        return fd
    os.close(fd)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"{what} is not a plain file")
    raise ValueError(f"{what} has {info.st_size} bytes, the update names {nbytes}")


def _take_room(fd: int, path: Path, nbytes: int) -> None:
    """A disk that fills up later cannot cut the file short."""
    try:
        os.posix_fallocate(fd, 0, max(nbytes, 1))
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno, f"{path} needs {nbytes / 1e6:.1f} MB, {free / 1e6:.1f} MB are left: {error.strerror}"
        ) from None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, _FOLDER_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_own(path: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        shutil.rmtree(path, ignore_errors=True)
