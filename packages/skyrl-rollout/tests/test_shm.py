"""Shared memory segments: who may map them, and that nobody leaves one behind."""

import os
import signal
import subprocess
import sys

import pytest
from skyrl_rollout.weights import shm

OWNER = """
import sys, time
from skyrl_rollout.weights.shm import Segment
segment = Segment(4096)
segment.buffer[:5] = b"hello"
print(segment.name, flush=True)
time.sleep(60)
"""


def start_owner() -> tuple[subprocess.Popen, str]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    return owner, owner.stdout.readline().strip()


def test_a_killed_owner_leaves_a_segment_that_the_next_start_removes_and_a_living_one_keeps_its_own():
    killed, left_behind = start_owner()
    living, in_use = start_owner()
    try:
        mapped = shm.map_segment(left_behind, 4096)
        assert left_behind not in shm.remove_stale()
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        removed = shm.remove_stale()
        assert left_behind in removed and in_use not in removed
        assert mapped[:5] == b"hello"  # a reader keeps the pages
        assert not (shm.SHM_DIR / left_behind).exists() and (shm.SHM_DIR / in_use).exists()
    finally:
        living.kill()
        living.wait()
        assert in_use in shm.remove_stale()


def test_an_owner_that_exits_without_closing_takes_its_segment_along():
    script = OWNER.replace("time.sleep(60)", "sys.exit(3)")
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3 and done.stdout.startswith(shm.PREFIX)
    assert not (shm.SHM_DIR / done.stdout.strip()).exists()


def test_a_segment_is_private_to_its_user_and_gone_after_close():
    segment = shm.Segment(100)
    path = shm.SHM_DIR / segment.name
    assert path.stat().st_mode & 0o777 == 0o600
    segment.buffer[:3] = b"abc"
    assert shm.map_segment(segment.name, 100)[:3] == b"abc"
    with pytest.raises(TypeError):
        shm.map_segment(segment.name, 100)[:3] = b"xyz"
    segment.close()
    assert not path.exists()


def test_links_paths_and_short_files_are_refused():
    segment = shm.Segment(100)
    link = shm.SHM_DIR / f"link-{segment.name}"
    link.symlink_to(shm.SHM_DIR / segment.name)
    try:
        with pytest.raises(ValueError, match="cannot be opened"):
            shm.map_segment(link.name, 100)
        with pytest.raises(ValueError, match="is not the name of a shared memory segment"):
            shm.map_segment("../shm/" + segment.name, 100)
        with pytest.raises(ValueError, match="has 100 bytes, the update names 101"):
            shm.map_segment(segment.name, 101)
        with pytest.raises(FileNotFoundError, match="was its trainer restarted"):
            shm.map_segment(segment.name + "0", 100)
    finally:
        link.unlink()
        segment.close()


def test_too_little_shared_memory_is_said_before_anything_is_written():
    with pytest.raises(MemoryError, match=r"/dev/shm has .* MB left.*--shm-size"):
        shm.Segment(shm.free_nbytes() + 4096)
    assert not list(shm.SHM_DIR.glob(f"{shm.PREFIX}.*.{os.getpid()}.*"))


def test_a_forked_child_that_exits_does_not_take_the_name_along():
    segment = shm.Segment(64)
    child = os.fork()
    if child == 0:
        segment.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (shm.SHM_DIR / segment.name).exists()
    segment.close()
