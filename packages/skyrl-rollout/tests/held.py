"""What a process holds of the machine: memory, descriptors, children and weights in shared memory, read from /proc."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from skyrl_rollout.weights import shm


def resident_bytes(pid: int) -> int:
    """Its resident memory; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def descriptors(pid: int) -> Counter[str]:
    """How many it has open of each kind: "socket", "pipe", a path, ..."""
    kinds: Counter[str] = Counter()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself, or closed meanwhile
                kinds[os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0]] += 1
    return kinds


def children(pid: int) -> Counter[str]:
    """Its child processes, ended ones that nobody waited for included."""
    found: Counter[str] = Counter()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (path / "stat").read_text().rpartition(") ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(rest.split()[1]) == pid:
            found[f"child {name.replace(' (', ' ')}"] += 1
    return found


def mapped_weights(pid: int) -> list[str]:
    """The segments with weights that it has mapped, unlinked ones included."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[5] for line in lines if f"{shm.SHM_DIR}/{shm.PREFIX}." in line]


@dataclass(frozen=True)
class Held:
    """What this process held at one moment."""

    things: Counter[str]

    @classmethod
    def now(cls, *folders: Path) -> Held:
        """folders: where it makes and removes update folders."""
        me = os.getpid()
        segments = Counter(f"segment {path.name}" for path in shm.SHM_DIR.glob(f"{shm.PREFIX}.*.{me}.*"))
        files = Counter(str(path) for folder in folders for path in folder.iterdir())
        mapped = Counter(f"mapping of {path}" for path in mapped_weights(me))
        return cls(descriptors(me) + children(me) + segments + files + mapped)

    def beyond(self, before: Held) -> list[str]:
        """What is held now and was not before."""
        return [f"{count} x {name}" for name, count in (self.things - before.things).items()]


class Life:
    """One process, looked at again and again: its resident memory and how many descriptors it has open."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sizes: list[int] = []
        self.counts: list[int] = []
        self.kinds: Counter[str] = Counter()

    def look(self) -> None:
        """Notes both, unless it has ended."""
        if size := resident_bytes(self.pid):
            self.sizes.append(size)
            self.kinds = descriptors(self.pid)
            self.counts.append(self.kinds.total())

    @property
    def growth_bytes(self) -> int:
        """By how much its memory grew after its first fifth."""
        first = len(self.sizes) // 5 + 1
        return max(self.sizes[first:], default=0) - max(self.sizes[:first])

    @property
    def more_descriptors(self) -> int:
        """By how many descriptors the median of its last fifth is above that of its second."""
        fifth = len(self.counts) // 5
        earlier, later = sorted(self.counts[fifth : 2 * fifth]), sorted(self.counts[-fifth:])
        return later[fifth // 2] - earlier[fifth // 2] if fifth else 0
