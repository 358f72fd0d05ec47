"""Weights in files: the folder a trainer makes, and what a server refuses to read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from skyrl_rollout.weights.file import UpdateFolder, folder_below, open_shard


def read(root: Path, folder: UpdateFolder, shard: int, nbytes: int) -> bytes:
    fd = open_shard(root, folder_below(folder.uri, root), shard, nbytes)
    try:
        return os.read(fd, nbytes)
    finally:
        os.close(fd)


def test_what_a_trainer_writes_a_server_reads_and_the_folder_goes(tmp_path: Path) -> None:
    root = tmp_path / "a root"
    root.mkdir()
    folder = UpdateFolder(root)
    folder.write(0, b"old and longer")
    folder.write(0, b"weights")
    folder.write(3, b"")
    assert read(root, folder, 0, 7) == b"weights"
    assert (folder.path / "shard-0.bin").stat().st_size == 7
    assert read(root, folder, 3, 0) == b""
    folder.close()
    assert list(root.iterdir()) == []


def test_a_trainer_that_exits_leaves_no_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from skyrl_rollout.weights.file import UpdateFolder;"
        "f = UpdateFolder(Path(sys.argv[1])); f.write(0, b'x'); print(f.uri)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("file:///")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "uri",
    [
        "{root}", "file://{root}", "file://{root}/../other", "file://{root}/a/%2e%2e/%2e%2e/b", "file:///etc",
        "file://elsewhere{root}/a", "http://{root}/a", "file:relative", "file://{root}/a?b", "file://{root}/a%00b", "",
        "file://{root}-other/a",
    ],
)  # fmt: skip
def test_only_folders_below_the_root_are_named(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ValueError, match="file:///|\\.\\.|below"):
        folder_below(uri.format(root=tmp_path), tmp_path)


def test_links_fifos_and_short_files_are_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "shard-0.bin").write_bytes(b"secrets")
    root = tmp_path / "root"
    root.mkdir()
    inside = root / "inside"
    inside.mkdir()
    (root / "link").symlink_to(outside)
    (inside / "shard-0.bin").symlink_to(outside / "shard-0.bin")
    os.mkfifo(inside / "shard-1.bin")
    (inside / "shard-2.bin").write_bytes(b"short")
    (inside / "shard-3.bin").mkdir()
    for folder, shard in (("link", 0), ("inside", 0), ("inside", 1), ("inside", 2), ("inside", 3)):
        with pytest.raises(ValueError, match="links are not followed|plain file|5 bytes"):
            open_shard(root, (folder,), shard, 7)
    with pytest.raises(FileNotFoundError, match="write every shard"):
        open_shard(root, ("inside",), 4, 7)
