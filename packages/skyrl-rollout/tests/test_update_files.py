"""Weights in files: the folder a trainer makes, and what a server refuses to read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from raw_calls import RawCalls, ask, refused
from raw_updates import abort, begin, commit, draft, flipped, forcing, in_shards, pull, seal, version
from skyrl_rollout.reference.process import ReferenceServer, reference_command
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.file import UpdateFolder, folder_below, open_shard, remove_stale


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


def test_the_folder_of_a_killed_trainer_goes_with_the_next_one_that_is_made(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from skyrl_rollout.weights.file import UpdateFolder;"
        "f = UpdateFolder(Path(sys.argv[1])); f.write(0, b'x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    mine = UpdateFolder(tmp_path)
    foreign = tmp_path / f"skyrl-update.another-machine.1.1.1.{'0' * 32}"
    foreign.mkdir()
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 3
    assert [p for p in remove_stale(tmp_path) if p in (mine.path, foreign)] == []
    assert set(tmp_path.iterdir()) == {mine.path, foreign}
    mine.close()


def test_a_full_disk_is_told_with_what_is_needed_and_nothing_is_left(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that the small disk goes with the process."""
    script = (
        "import sys; from pathlib import Path; from skyrl_rollout.weights.file import UpdateFolder\n"
        "f = UpdateFolder(Path(sys.argv[1]))\n"
        "f.write(0, bytes(500_000))\n"
        "try: f.write(1, bytes(900_000))\n"
        "except OSError as error: print(error)\n"
        "f.close(); print(list(Path(sys.argv[1]).iterdir()))"
    )
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this system lets nobody mount a small disk")
    assert "needs 0.9 MB, 0.5 MB are left: No space left on device" in done.stdout
    assert done.stdout.endswith("[]\n")


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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updates")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ReferenceServer]:
    with ReferenceServer("--logits", "canary", "--update-root", str(root)) as process:
        yield process


def at(uri: str) -> pb.Transport:
    return pb.Transport(file=pb.FileTransport(uri=uri))


async def test_an_update_in_files_is_copied_checked_and_committed(calls: RawCalls, epoch: int, root: Path) -> None:
    now = await version(calls)
    d, shards = in_shards(draft(now + 1, forcing(40)))
    folder = UpdateFolder(root)
    for shard, data in enumerate(shards):
        folder.write(shard, data)
    await begin(calls, epoch, d, transport=at(folder.uri))
    told = await pull(calls, epoch, d.update_id)
    folder.close()
    assert [m.phase for m in told][:1] + [m.phase for m in told][-2:] == [
        pb.PullUpdateResponse.PHASE_READY,
        pb.PullUpdateResponse.PHASE_PROGRESS,
        pb.PullUpdateResponse.PHASE_SOURCE_RELEASED,
    ]
    assert told[-1].bytes_done == told[-1].bytes_total == sum(map(len, shards))
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    assert (await calls.generate(ask(3))).tokens() == [40] * 3
    assert os.listdir(root) == []


async def test_a_file_that_is_missing_or_short_can_be_written_and_pulled_again(
    calls: RawCalls, epoch: int, root: Path
) -> None:
    now = await version(calls)
    d = draft(now + 1, forcing(41))
    folder = UpdateFolder(root)
    await begin(calls, epoch, d, transport=at(folder.uri))
    missing = await refused(pull(calls, epoch, d.update_id))
    folder.write(0, bytes(d.shard[:100]))
    short = await refused(pull(calls, epoch, d.update_id))
    incomplete = await refused(seal(calls, epoch, d.update_id))
    folder.write(0, bytes(d.shard))
    await pull(calls, epoch, d.update_id)
    await pull(calls, epoch, d.update_id)
    await seal(calls, epoch, d.update_id)
    await commit(calls, epoch, d.update_id, now)
    folder.close()
    assert (missing.code, missing.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert (short.code, "100 bytes" in short.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert incomplete.code is grpc.StatusCode.FAILED_PRECONDITION
    assert (await calls.generate(ask(3))).tokens() == [41] * 3


async def test_a_rotten_file_is_found_at_the_seal(calls: RawCalls, epoch: int, root: Path) -> None:
    now = await version(calls)
    good = draft(now + 1, forcing(42))
    folder = UpdateFolder(root)
    folder.write(0, bytes(flipped(good).shard))
    await begin(calls, epoch, good, transport=at(folder.uri))
    await pull(calls, epoch, good.update_id)
    assert (await refused(seal(calls, epoch, good.update_id))).code is grpc.StatusCode.DATA_LOSS
    folder.write(0, bytes(good.shard))
    await pull(calls, epoch, good.update_id)
    await seal(calls, epoch, good.update_id)
    await abort(calls, epoch, good.update_id)
    folder.close()
    assert await version(calls) == now


async def test_a_server_reads_nothing_outside_its_root_and_follows_no_link(
    calls: RawCalls, epoch: int, root: Path, tmp_path: Path
) -> None:
    d = draft(await version(calls) + 1)
    (tmp_path / "shard-0.bin").write_bytes(d.shard)
    outside = await refused(begin(calls, epoch, d, transport=at(tmp_path.as_uri())))
    assert (outside.code, str(root) in outside.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    link = root / "link"
    link.symlink_to(tmp_path)
    await begin(calls, epoch, d, transport=at(link.as_uri()))
    followed = await refused(pull(calls, epoch, d.update_id))
    await abort(calls, epoch, d.update_id)
    link.unlink()
    assert (followed.code, "links are not followed" in followed.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_server_with_a_root_says_that_it_takes_files(calls: RawCalls) -> None:
    info = await calls.engine.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=5)
    assert "file" in info.capabilities.transports


def test_a_root_that_is_none_is_told_before_the_server_starts() -> None:
    command = [*reference_command(), "--update-root", "not/absolute"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, "--update-root not/absolute" in done.stderr) == (2, True)
