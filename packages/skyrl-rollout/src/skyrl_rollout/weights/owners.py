"""Which process made a thing that outlives it, told by its name, so that leftovers are known from what lives."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def owner_tag() -> str:
    """ "<pid namespace>.<pid>.<start time>" of this process, for a name."""
    return f"{_pid_namespace()}.{os.getpid()}.{_start_time(os.getpid())}"


def is_gone(tag: str) -> bool:
    """Whether the process of that tag has ended; False for one of another PID namespace, which nobody here can see."""
    namespace, pid, start = tag.split(".")
    return int(namespace) == _pid_namespace() and _start_time(int(pid)) != int(start)


@cache
def boot_id() -> str:
    """A UUID of this boot of this machine, "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@cache
def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int:
    """Clock ticks from boot to the start of the process; -1 when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] in ("Z", "X") else int(fields[19])
