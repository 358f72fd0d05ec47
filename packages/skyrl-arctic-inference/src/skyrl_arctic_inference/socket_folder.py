"""Where vLLM puts its sockets while it starts: a folder per server, so that what a killed one left can be removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "arctic-serve-"
LOCK = "owner.lock"
SHORT_ROOT = Path("/tmp")
ROOT_LIMIT = 107 - len(f"/{PREFIX}12345678/") - 36  # a socket's path has 107 bytes at most, its name is a UUID


class SocketFolder:
    """A new folder under the system's temporary folder (/tmp where that has too long a name for a socket), held by a
    lock that the kernel drops with its owner. Making one removes those whose owner is dead."""

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        root = root if len(os.fsencode(root)) <= ROOT_LIMIT else SHORT_ROOT
        remove_stale(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        self._fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes the folder. Safe to call twice."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_stale(root: Path) -> list[Path]:
    """Removes folders of dead servers of this user and returns them."""
    removed = []
    for folder in root.glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # just being made, or just being removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(fd)
    return removed
