"""Memory that carries new weights to the engine's processes, and what a server leaves on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from skyrl_arctic_inference.engine.staged_bytes import StagedBytes
from skyrl_arctic_inference.socket_folder import ROOT_LIMIT, SocketFolder
from skyrl_rollout.weights.manifest import TensorLayout


def tensors(*arrays: np.ndarray):
    return [(TensorLayout(f"t{i}", "f32", a.shape), memoryview(a).cast("B")) for i, a in enumerate(arrays)]


def test_another_process_reads_the_bytes_by_path():
    staged = StagedBytes()
    arrays = [np.arange(5, dtype=np.float32), np.full((3, 2), 7, np.float32)]
    rows = [t.as_row() for t in staged.fill(iter(tensors(*arrays)))]
    assert rows == [("t0", "f32", [5], 0), ("t1", "f32", [3, 2], 64)]
    read = f"import numpy as n; print(n.fromfile({staged.path!r}, n.float32, 6, offset={rows[1][3]}).tolist())"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([7.0] * 6)
    staged.close()


def test_the_same_memory_serves_every_update_and_grows_only_when_needed():
    staged = StagedBytes()
    staged.fill(iter(tensors(np.ones(10, np.float32))))
    path, size = staged.path, staged.nbytes
    staged.fill(iter(tensors(np.zeros(10, np.float32))))
    assert (staged.path, staged.nbytes) == (path, size)
    staged.fill(iter(tensors(np.ones(size // 4 + 1, np.float32))))
    assert staged.path == path and staged.nbytes >= size + 4
    assert np.fromfile(path, np.float32, 3).tolist() == [1.0] * 3
    staged.close()


def test_only_bytes_that_were_never_written_take_memory():
    staged = StagedBytes()
    assert staged.missing(4000) == 4000, "the file is larger at once, but pages come with the first write"
    staged.fill(iter(tensors(np.ones(1000, np.float32))))
    assert (staged.missing(4000), staged.missing(6000)) == (0, 2000)
    staged.close()


def test_an_empty_tensor_takes_no_room():
    staged = StagedBytes()
    rows = [t.as_row() for t in staged.fill(iter(tensors(np.zeros(0, np.float32), np.ones(1, np.float32))))]
    assert rows == [("t0", "f32", [0], 0), ("t1", "f32", [1], 0)]
    staged.close()


def test_a_socket_folder_is_kept_while_its_owner_lives_and_removed_after(tmp_path: Path, monkeypatch):
    root = tmp_path if len(str(tmp_path)) <= ROOT_LIMIT else Path("/tmp")
    monkeypatch.setattr("tempfile.tempdir", str(root))
    code = (
        "import time\nfrom skyrl_arctic_inference.socket_folder import SocketFolder\n"
        "folder = SocketFolder()\nprint(folder.path, flush=True)\ntime.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(root)})
    assert owner.stdout is not None
    held = Path(owner.stdout.readline().strip())
    mine = SocketFolder()
    assert held.is_dir() and mine.path.is_dir()
    owner.kill()
    owner.wait()
    other = SocketFolder()
    assert not held.exists() and mine.path.is_dir()
    mine.close()
    other.close()
    assert not mine.path.exists() and not other.path.exists()


def test_a_long_temporary_folder_is_not_used_for_sockets(tmp_path: Path, monkeypatch):
    long = tmp_path / ("x" * ROOT_LIMIT)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = SocketFolder()
    assert len(str(folder.path / ("u" * 36))) <= 107
    folder.close()


def test_the_last_lines_of_stderr_are_kept_passed_on_and_name_the_cause():
    code = """
import os
from skyrl_arctic_inference.last_lines import LastLines
lines = LastLines()
os.write(2, b"first\\n(EngineCore pid=7) ERROR [core.py:1] torch.OutOfMemoryError: no room left\\n")
os.write(2, b"RuntimeError: Engine core initialization failed. See root cause above.\\n")
lines.close()
print(lines.cause(), len(lines.last(99)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "OutOfMemoryError: no room left 3" and done.stderr.startswith("first\n")
