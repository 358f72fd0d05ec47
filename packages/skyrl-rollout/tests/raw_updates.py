"""Weight updates made by hand, so that a test can make every mistake that a publisher never makes."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import google_crc32c
import numpy as np
from raw_calls import RawCalls, fence
from skyrl_rollout import wire
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.manifest import (
    Lora,
    Manifest,
    TensorLayout,
    TensorSpec,
    content_digest,
    fingerprint,
    place,
)
from skyrl_rollout.weights.shm import namespace_id

VOCAB = 64
LAYOUT = (
    TensorLayout("canary.weight", "f32", (VOCAB,)),
    TensorLayout("model.embed_tokens.weight", "f32", (VOCAB, 16)),
    TensorLayout("model.norm.weight", "f32", (16,)),
)
ADAPTER = (
    TensorLayout("base_model.model.model.embed_tokens.lora_A.weight", "f32", (1, 16)),
    TensorLayout("base_model.model.model.embed_tokens.lora_B.weight", "f32", (VOCAB, 1)),
)
LORA = Lora(fingerprint(LAYOUT), 1, 2.0, ("embed_tokens",))
FORCING = 1000.0  # a bias no other logit can reach


def forcing(token: int) -> dict[str, np.ndarray]:
    """Weights under which the canary server says nothing but `token`."""
    canary = np.zeros(VOCAB, "<f4")
    canary[token] = FORCING
    return {"canary.weight": canary}


@dataclass
class Draft:
    """One update: what the manifest says, the shard's bytes, and the id under which it is offered."""

    manifest: Manifest
    shard: bytearray
    update_id: str = field(default_factory=lambda: str(uuid.uuid4()))


def draft(
    version: int, values: dict[str, np.ndarray] | None = None, layout: tuple[TensorLayout, ...] = LAYOUT
) -> Draft:
    """All tensors of `layout` in one shard: `values` by name, zeros elsewhere."""
    specs = place(layout)
    shard = bytearray(max(s.offset + s.layout.nbytes for s in specs))
    done = []
    for spec in specs:
        value = (values or {}).get(spec.layout.name)
        view = memoryview(shard)[spec.offset : spec.offset + spec.layout.nbytes]
        if value is not None:
            view[:] = np.ascontiguousarray(value).tobytes()
        done.append(replace(spec, content_digest=content_digest(view)))
    return Draft(Manifest(version, tuple(done)), shard)


def delta_draft(
    version: int, base: int, changes: dict[str, tuple[list[int], np.ndarray]], whole: dict[str, np.ndarray]
) -> Draft:
    """Changed elements by tensor name: indices and values; `whole` is what the tensors must be afterwards."""
    shapes, specs, shard = {t.name: t for t in LAYOUT}, [], bytearray()
    for name, (indices, values) in changes.items():
        data = np.array(indices, "<i4").tobytes() + values.tobytes()
        digest = content_digest(np.ascontiguousarray(whole[name]).tobytes())
        specs.append(TensorSpec(shapes[name], 0, len(shard), digest, len(data)))
        shard += data
    return Draft(Manifest(version, tuple(specs), base_version=base), shard)


def adapter_draft(
    policy_id: str, version: int, token: int, *, lora: Lora | None = None, layout: tuple[TensorLayout, ...] = ADAPTER
) -> Draft:
    """An adapter under which the canary server says nothing but `token`, whatever the base says."""
    up = np.zeros((VOCAB, 1), "<f4")
    up[token] = 4 * FORCING
    d = draft(version, {ADAPTER[1].name: up} if layout == ADAPTER else {}, layout)
    d.manifest = replace(d.manifest, policy_id=policy_id, lora=lora or LORA)
    return d


def in_shards(d: Draft) -> tuple[Draft, list[bytes]]:
    """The same update with a shard per tensor, and the bytes of each."""
    specs, shards = [], []
    for i, t in enumerate(d.manifest.tensors):
        shards.append(bytes(d.shard[t.offset : t.offset + t.nbytes]))
        specs.append(replace(t, shard=i, offset=0))
    return replace(d, manifest=replace(d.manifest, tensors=tuple(specs))), shards


async def begin(calls: RawCalls, epoch: int, d: Draft, **fields: object) -> pb.BeginUpdateResponse:
    given = {
        "fence": fence(epoch),
        "update_id": d.update_id,
        "manifest": wire.manifest_to_pb(d.manifest),
        "transport": pb.Transport(inline=pb.InlineTransport()),
    } | fields
    return await calls.weights.BeginUpdate(pb.BeginUpdateRequest(**given), timeout=10)


def chunk(d: Draft, start: int, end: int, **fields: object) -> pb.UploadChunksRequest:
    data = bytes(d.shard[start:end])
    given = {"update_id": d.update_id, "offset": start, "data": data, "crc32c": google_crc32c.value(data)}
    return pb.UploadChunksRequest(**(given | fields))


async def send(calls: RawCalls, *chunks: pb.UploadChunksRequest) -> pb.UploadChunksResponse:
    async def stream() -> AsyncIterator[pb.UploadChunksRequest]:
        for c in chunks:
            yield c

    return await calls.weights.UploadChunks(stream(), timeout=10)


async def seal(calls: RawCalls, epoch: int, update_id: str) -> pb.SealUpdateResponse:
    return await calls.weights.SealUpdate(pb.SealUpdateRequest(fence=fence(epoch), update_id=update_id), timeout=10)


async def commit(
    calls: RawCalls, epoch: int, update_id: str, expected: int, **fields: object
) -> pb.CommitUpdateResponse:
    request = pb.CommitUpdateRequest(fence=fence(epoch), update_id=update_id, expected_version=expected, **fields)
    return await calls.weights.CommitUpdate(request, timeout=float(10))


async def staged(calls: RawCalls, epoch: int, d: Draft) -> Draft:
    """Begun, uploaded and sealed."""
    await begin(calls, epoch, d)
    await send(calls, chunk(d, 0, len(d.shard)))
    await seal(calls, epoch, d.update_id)
    return d


async def published(calls: RawCalls, epoch: int, d: Draft, **fields: object) -> pb.CommitUpdateResponse:
    """Staged and committed over the version before."""
    await staged(calls, epoch, d)
    return await commit(calls, epoch, d.update_id, await version(calls, d.manifest.policy_id), **fields)


async def version(calls: RawCalls, policy_id: str = "") -> int:
    """0 for an adapter that is not loaded."""
    return (await versions(calls)).get(policy_id, 0)


async def versions(calls: RawCalls) -> dict[str, int]:
    info = await calls.engine.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=10)
    return dict(info.weight_versions)


async def state(calls: RawCalls, update_id: str) -> str:
    reply = await calls.weights.GetUpdate(pb.GetUpdateRequest(update_id=update_id), timeout=10)
    return pb.UpdateState.Name(reply.state).removeprefix("UPDATE_STATE_")


@contextmanager
def shm_file(data: bytes, name: str | None = None) -> Iterator[str]:
    name = name or f"skyrl-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, data)
    os.close(fd)
    try:
        yield name
    finally:
        path.unlink(missing_ok=True)


def shm_transport(name: str, nbytes: int, namespace: str | None = None) -> pb.Transport:
    segment = pb.ShmSegment(shard=0, name=name, nbytes=nbytes)
    return pb.Transport(shm=pb.ShmTransport(namespace_id=namespace or namespace_id(), segments=[segment]))


async def abort(calls: RawCalls, epoch: int, update_id: str) -> pb.AbortUpdateResponse:
    return await calls.weights.AbortUpdate(pb.AbortUpdateRequest(fence=fence(epoch), update_id=update_id), timeout=10)


async def pull(calls: RawCalls, epoch: int, update_id: str) -> list[pb.PullUpdateResponse]:
    request = pb.PullUpdateRequest(fence=fence(epoch), update_id=update_id)
    return [m async for m in calls.weights.PullUpdate(request, timeout=10)]


def flipped(d: Draft) -> Draft:
    """The same manifest, one bit wrong in the bytes."""
    shard = bytearray(d.shard)
    shard[len(shard) // 2] ^= 1
    return replace(d, shard=shard)
