"""How much memory can still be taken: of the machine, and of every control group that this process is in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Where a group says what it may take, what it has taken, and which of that the kernel gives back when asked."""

    limit: str
    used: str
    reclaimable: str  # a field of memory.stat, over the group and all below it


_FIRST = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Files("memory.max", "memory.current", "inactive_file")


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that can be taken without swapping. sys.maxsize where the system does not say: the allocation itself will
    tell. proc, cgroups: where the kernel's files are mounted."""
    try:
        free = _field(proc / "meminfo", "MemAvailable:") * 1024
    except (OSError, StopIteration):
        return sys.maxsize
    return max(0, min([free, *_left_in_groups(proc, cgroups)]))


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What is left below each limit. A group without one, and a file that is not there, say nothing."""
    for folder, files in _groups(proc, cgroups):
        with contextlib.suppress(OSError, StopIteration, ValueError):  # "max" is no number
            limit = int((folder / files.limit).read_text())
            used = int((folder / files.used).read_text())
            yield limit - used + _field(folder / "memory.stat", files.reclaimable)


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    """The group of this process and all above it, in both versions of control groups: each has a limit of its own.

    Inside a container the path may be the host's, of which only the end, or nothing, is mounted: the top of the mount
    is always looked at.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            top, files = cgroups / "memory", _FIRST
        elif number == "0":
            top, files = cgroups, _SECOND
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for group in (PurePosixPath(),) if ".." in below.parts else (below, *below.parents):
            yield top / group, files


def _field(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name])
