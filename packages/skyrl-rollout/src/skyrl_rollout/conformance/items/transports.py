"""Item 44: shared memory that is not what it says is refused, and none is left behind by whoever is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from skyrl_rollout.conformance.item import Failed, NotRun, expect
from skyrl_rollout.conformance.items.restart import Restart, restarted
from skyrl_rollout.conformance.items.updates import sample
from skyrl_rollout.conformance.stubs import outcome, refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.conformance.trainer import Draft, Trainer
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.shm import SHM_DIR, namespace_id, remove_stale

REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OUT_OF_RANGE,
)  # fmt: skip
DYING_TRAINER = """
import sys, time
from skyrl_rollout.weights.shm import Segment
segment = Segment(int(sys.argv[1]))
print(segment.name, flush=True)
time.sleep(60)
"""


async def shared_memory_is_checked(target: Target) -> None:
    """Item 44."""
    target.need("transports:shm")
    if target.info.shm_namespace_id != namespace_id():
        raise NotRun("a server on this host")
    trainer = await target.trainer()
    version = await trainer.version()
    before = await sample(target)
    update = target.noise(version + 1)
    with segment(update.shard) as good, segment(update.shard[:-64]) as short, link_to(good) as link:
        for name, what in ((link, "a symlink"), (short, "a file that is too short"), ("../../etc/passwd", "a path")):
            await refuses(trainer, fresh(update), name, what)
        await refuses(trainer, fresh(update), good, "another namespace", namespace=f"{uuid.uuid4()}:1")
        expect(await sample(target) == before, "greedy output changed by segments that were refused")
        await trainer.begin(update, transport=shm(good, len(update.shard)))
        async for _ in trainer.pull(update):
            pass
        await trainer.seal(update)
        await trainer.commit(update, version)
    expect((await sample(target))[2] == version + 1, "weights from shared memory do not serve after their commit")
    dying_trainer_leaves_nothing(len(update.shard))
    if target.launcher is None:
        raise NotRun("launcher")
    record: Restart = await restarted(target)
    expect(
        record.leftovers == [],
        f"after kill -9 of the server and a restart /dev/shm has {record.leftovers} more than before",
    )


async def refuses(trainer: Trainer, update: Draft, name: str, what: str, *, namespace: str | None = None) -> None:
    """The segment is refused at BeginUpdate or at PullUpdate, and at the latest when it is sealed. Raises Failed."""
    error = await outcome(trainer.begin(update, transport=shm(name, len(update.shard), namespace)))
    if error is None:
        error = await outcome(trainer.pull(update))
        if error is None:
            await refused(trainer.seal(update), *REFUSALS, grpc.StatusCode.DATA_LOSS, what=f"a segment that is {what}")
            raise Failed(f"a segment that is {what} was read, though its bytes were refused later")
        await trainer.abort(update)
    expect(error.code in REFUSALS, f"a segment that is {what} ended with {error.code.name}: {error.message}")


def fresh(update: Draft) -> Draft:
    """The same under another id."""
    return Draft(update.manifest, update.shard)


def shm(name: str, nbytes: int, namespace: str | None = None) -> pb.Transport:
    """One segment with shard 0."""
    part = pb.ShmSegment(shard=0, name=name, nbytes=nbytes)
    return pb.Transport(shm=pb.ShmTransport(namespace_id=namespace or namespace_id(), segments=[part]))


def dying_trainer_leaves_nothing(nbytes: int) -> None:
    """A trainer that is killed leaves its segment; the next one to start removes it. Raises Failed."""
    with subprocess.Popen(
        [sys.executable, "-c", DYING_TRAINER, str(nbytes)], stdout=subprocess.PIPE, text=True
    ) as dying:
        assert dying.stdout is not None
        name = dying.stdout.readline().strip()
        dying.kill()
    remove_stale()
    expect(bool(name) and not (SHM_DIR / name).exists(), f"/dev/shm/{name} of a killed trainer is left behind")


@contextmanager
def segment(data: bytes) -> Iterator[str]:
    """A file under /dev/shm."""
    path = SHM_DIR / f"conformance-{uuid.uuid4().hex}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        yield path.name
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def link_to(name: str) -> Iterator[str]:
    """A symlink under /dev/shm to another segment."""
    path = Path(SHM_DIR) / f"conformance-{uuid.uuid4().hex}"
    path.symlink_to(SHM_DIR / name)
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)
