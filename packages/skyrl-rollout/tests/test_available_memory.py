"""What may still be taken is the least that the machine and any control group around the process leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from skyrl_rollout.server.available_memory import available_memory

MIB = 1 << 20
SECOND = ("memory.max", "memory.current", "inactive_file")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NO_LIMIT = {SECOND: "max", FIRST: str((1 << 63) - 4096)}  # as the kernel writes it


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {2000 * 1024} kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path / "proc"


def group(folder: Path, files: tuple[str, str, str], limit: int | None, used: int = 0, reclaimable: int = 0) -> None:
    """Sizes in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{NO_LIMIT[files] if limit is None else limit * MIB}\n")
    (folder / files[1]).write_text(f"{used * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{files[2]} {reclaimable * MIB}\n")


@pytest.mark.parametrize(
    ("files", "line", "top"), [(SECOND, "0::", "cgroup"), (FIRST, "4:cpu,memory:", "cgroup/memory")]
)
class TestBothVersions:
    @pytest.fixture(autouse=True)
    def _place(self, proc: Path, tmp_path: Path, files: tuple[str, str, str], line: str, top: str) -> None:
        self.proc, self.root, self.top, self.files = proc, tmp_path / "cgroup", tmp_path / top, files
        (proc / "self/cgroup").write_text(f"9:name=systemd:/pod/server\n{line}/pod/server\n")

    def left(self) -> int:
        return available_memory(self.proc, self.root) // MIB

    def test_the_limit_of_its_own_group_counts_without_what_the_kernel_gives_back(self) -> None:
        group(self.top / "pod/server", self.files, 300, used=250, reclaimable=30)
        assert self.left() == 80

    def test_the_limit_of_a_group_above_counts_too(self) -> None:
        group(self.top / "pod/server", self.files, None, used=10)
        group(self.top / "pod", self.files, 200, used=140)
        group(self.top, self.files, None)
        assert self.left() == 60

    def test_inside_a_container_the_top_of_the_mount_is_its_group(self) -> None:
        group(self.top, self.files, 200, used=190)
        assert self.left() == 10
        (self.proc / "self/cgroup").write_text((self.proc / "self/cgroup").read_text().replace("/pod/", "/../pod/"))
        assert self.left() == 10

    def test_a_group_that_is_over_its_limit_leaves_nothing(self) -> None:
        group(self.top / "pod", self.files, 100, used=120)
        assert self.left() == 0

    def test_no_limit_leaves_what_the_machine_has(self) -> None:
        group(self.top / "pod/server", self.files, None, used=10)
        assert self.left() == 1000


def test_a_system_that_says_nothing_lets_the_allocation_tell(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) == sys.maxsize


def test_a_machine_without_control_groups_says_what_it_has(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, tmp_path) == 1000 * MIB
    assert available_memory() > 0
