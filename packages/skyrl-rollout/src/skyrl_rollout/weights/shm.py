"""Shared memory of one host that carries weights: made by the trainer, mapped read-only by a server, left by nobody."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import weakref
from pathlib import Path

from skyrl_rollout.weights.file import checked
from skyrl_rollout.weights.owners import boot_id, is_gone, owner_tag

SHM_DIR = Path("/dev/shm")
PREFIX = "skyrl-weights"
_OWN_NAME = re.compile(rf"{PREFIX}\.(\d+\.\d+\.\d+)\.[0-9a-f]{{32}}")
_READER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def namespace_id() -> str:
    """ "<boot_id>:<st_dev of /dev/shm>": two processes with equal ids can share memory by name; "" without /dev/shm."""
    try:
        return f"{boot_id()}:{os.stat(SHM_DIR).st_dev}" if boot_id() else ""
    except OSError:
        return ""


def free_nbytes() -> int:
    """Bytes that can still be written under /dev/shm; containers often give 64 MB."""
    fs = os.statvfs(SHM_DIR)
    return fs.f_bavail * fs.f_frsize


class Segment:
    """A segment of this process's making: `name` under /dev/shm, `buffer` to write. `close` unlinks it.

    The name tells who owns it (PID namespace, PID, start time of the process), so that `remove_stale` can tell a
    leftover of a killed trainer from a living one, and ends in 128 random bits.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises MemoryError, saying what is needed, when /dev/shm has not enough room left."""
        free = free_nbytes()
        if nbytes > free:
            raise MemoryError(
                f"the weights need {nbytes / 1e6:.1f} MB of shared memory and /dev/shm has {free / 1e6:.1f} MB left: "
                f"enlarge it (docker run --shm-size), or publish with transport='inline'"
            )
        self.nbytes = nbytes
        self.name = f"{PREFIX}.{owner_tag()}.{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(SHM_DIR / self.name, flags, 0o600)
        try:
            # posix_fallocate takes the pages: another process cannot eat the room and turn a write into SIGBUS
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            self._map = mmap.mmap(fd, max(nbytes, 1))
            self._unlink = weakref.finalize(self, _unlink_own, self.name, os.getpid())  # also at exit
        except BaseException as error:
            os.unlink(SHM_DIR / self.name)
            if isinstance(error, OSError):
                raise MemoryError(f"{nbytes / 1e6:.1f} MB of shared memory cannot be taken: {error.strerror}") from None
            raise
        finally:
            os.close(fd)

    @property
    def buffer(self) -> mmap.mmap:
        return self._map

    def close(self) -> None:
        """Unlinks the name; readers that have it mapped keep their pages. A forked child leaves the name alone."""
        self._unlink()
        with contextlib.suppress(BufferError):  # someone still holds a view; the pages go when it does
            self._map.close()


def open_segment(name: str, nbytes: int) -> int:
    """A descriptor of another process's segment, to read `nbytes` of.

    Raises ValueError for a name that is a path, a link, no plain file, or a file that is too short; FileNotFoundError
    when there is none.
    """
    if not _READER_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a shared memory segment: letters, digits, '.', '_', '-' only")
    try:
        fd = os.open(SHM_DIR / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no shared memory segment {name}: was its trainer restarted?") from None
    except OSError as error:
        raise ValueError(f"shared memory segment {name} cannot be opened: {error.strerror}") from None
    return checked(fd, f"shared memory segment {name}", max(nbytes, 1))


def map_segment(name: str, nbytes: int) -> mmap.mmap:
    """Maps `nbytes` of another process's segment, read-only. Raises as `open_segment`."""
    fd = open_segment(name, nbytes)
    try:
        return mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def remove_stale() -> list[str]:
    """Unlinks segments whose owner (of this PID namespace and user) is dead; returns their names."""
    removed = []
    for path in SHM_DIR.glob(f"{PREFIX}.*") if SHM_DIR.is_dir() else ():
        match = _OWN_NAME.fullmatch(path.name)
        if match is None or not is_gone(match[1]):
            continue
        try:
            if path.lstat().st_uid == os.geteuid():
                path.unlink()
                removed.append(path.name)
        except FileNotFoundError:
            pass  # another trainer removed it at the same moment
    return removed


def _unlink_own(name: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        (SHM_DIR / name).unlink(missing_ok=True)
