"""A trainer made of raw calls, so that a check can make every mistake that a publisher never makes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c

from skyrl_rollout import wire
from skyrl_rollout.conformance.stubs import Stubs
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, content_digest, place

UPLOAD_S = 60.0


@dataclass
class Draft:
    """One update: what the manifest says, the bytes of its one shard, and the id under which it is offered."""

    manifest: Manifest
    shard: bytes
    update_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def flipped(self) -> Draft:
        """The same manifest; one bit of the bytes is wrong."""
        shard = bytearray(self.shard)
        shard[len(shard) // 2] ^= 1
        return replace(self, shard=bytes(shard))


def draft(version: int, weights: Mapping[str, bytes], layout: Sequence[TensorLayout], **fields: Any) -> Draft:
    """Every tensor of `layout`, one after another."""
    specs = place(layout)
    shard = bytearray(max(s.offset + s.layout.nbytes for s in specs))
    done = []
    for spec in specs:
        data = weights[spec.layout.name]
        shard[spec.offset : spec.offset + len(data)] = data
        done.append(replace(spec, content_digest=content_digest(data)))
    return Draft(Manifest(version, tuple(done), **fields), bytes(shard))


class Trainer:
    """The owner of a server, by the epoch that it was given."""

    def __init__(self, stubs: Stubs, epoch: int, chunk_bytes: int) -> None:
        self.stubs, self.epoch, self.chunk_bytes = stubs, epoch, chunk_bytes

    def fence(self, op_id: str | None = None) -> control_pb2.Fence:
        """What goes with every control call."""
        return control_pb2.Fence(trainer_epoch=self.epoch, op_id=op_id or str(uuid.uuid4()))

    async def version(self, policy_id: str = "") -> int:
        """The committed version."""
        return (await self.stubs.info()).weight_versions[policy_id]

    def begin(self, d: Draft, **fields: Any) -> Any:
        """The call BeginUpdate, to be awaited."""
        given: dict[str, Any] = {
            "fence": self.fence(),
            "update_id": d.update_id,
            "manifest": wire.manifest_to_pb(d.manifest),
            "transport": pb.Transport(inline=pb.InlineTransport()),
        } | fields
        return self.stubs.weights.BeginUpdate(pb.BeginUpdateRequest(**given))

    def chunk(self, d: Draft, start: int, end: int, **fields: Any) -> pb.UploadChunksRequest:
        """One message of UploadChunks."""
        data = d.shard[start:end]
        given = {"update_id": d.update_id, "offset": start, "data": data, "crc32c": google_crc32c.value(data)}
        return pb.UploadChunksRequest(**(given | fields))

    def send(self, *chunks: pb.UploadChunksRequest) -> Any:
        """The call UploadChunks with these messages, to be awaited."""

        async def messages() -> AsyncIterator[pb.UploadChunksRequest]:
            for chunk in chunks:
                yield chunk

        return self.stubs.weights.UploadChunks(messages(), timeout=UPLOAD_S)

    async def upload(self, d: Draft, start: int = 0, end: int | None = None) -> pb.UploadChunksResponse:
        """Bytes [start, end) of the shard."""
        end = len(d.shard) if end is None else end
        starts = range(start, end, self.chunk_bytes)
        reply: pb.UploadChunksResponse = await self.send(
            *(self.chunk(d, a, min(a + self.chunk_bytes, end)) for a in starts)
        )
        return reply

    def seal(self, d: Draft) -> Any:
        """The call SealUpdate."""
        return self.stubs.weights.SealUpdate(
            pb.SealUpdateRequest(fence=self.fence(), update_id=d.update_id), timeout=UPLOAD_S
        )

    def commit(self, d: Draft, expected: int, *, timeout_s: float = UPLOAD_S, **fields: Any) -> Any:
        """The call CommitUpdate."""
        request = pb.CommitUpdateRequest(fence=self.fence(), update_id=d.update_id, expected_version=expected, **fields)
        return self.stubs.weights.CommitUpdate(request, timeout=timeout_s)

    def abort(self, d: Draft) -> Any:
        """The call AbortUpdate."""
        return self.stubs.weights.AbortUpdate(pb.AbortUpdateRequest(fence=self.fence(), update_id=d.update_id))

    def pull(self, d: Draft) -> Any:
        """The call PullUpdate, a stream."""
        return self.stubs.weights.PullUpdate(
            pb.PullUpdateRequest(fence=self.fence(), update_id=d.update_id), timeout=UPLOAD_S
        )

    async def stage(self, d: Draft) -> Draft:
        """Begun, uploaded, sealed."""
        await self.begin(d)
        await self.upload(d)
        await self.seal(d)
        return d

    async def publish(self, d: Draft, **fields: Any) -> pb.CommitUpdateResponse:
        """Staged, and committed over the version before."""
        await self.stage(d)
        before = await self.version(d.manifest.policy_id) if d.manifest.policy_id == "" else fields.pop("expected", 0)
        reply: pb.CommitUpdateResponse = await self.commit(d, before, **fields)
        return reply

    async def state(self, update_id: str) -> str:
        """ "OPEN", "SEALED", ..."""
        reply = await self.stubs.weights.GetUpdate(pb.GetUpdateRequest(update_id=update_id))
        return pb.UpdateState.Name(reply.state).removeprefix("UPDATE_STATE_")

    def pause(
        self, mode: control_pb2.PauseMode, *, lease_s: float = 30.0, op_id: str | None = None, **fields: Any
    ) -> Any:
        """The call Pause."""
        request = control_pb2.PauseRequest(fence=self.fence(op_id), mode=mode, **fields)
        request.lease.FromNanoseconds(int(lease_s * 1e9))
        return self.stubs.engine.Pause(request)

    def resume(self, pause_id: str, *, op_id: str | None = None) -> Any:
        """The call Resume."""
        return self.stubs.engine.Resume(control_pb2.ResumeRequest(fence=self.fence(op_id), pause_id=pause_id))
