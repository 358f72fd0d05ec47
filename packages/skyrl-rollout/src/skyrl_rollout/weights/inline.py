"""Weights as chunks on a gRPC stream of their own: dense offsets, a crc32c each, resumed where the server stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator

import google_crc32c

from skyrl_rollout.v1 import weights_pb2
from skyrl_rollout.weights.arena import Arena

MAX_CHUNK_BYTES = 1 << 20  # larger ones stall the server's other calls and save nothing


def chunk_bytes(*limits: int) -> int:
    """The largest chunk that every side takes; 0 is no opinion."""
    return min([MAX_CHUNK_BYTES, *(limit for limit in limits if limit > 0)])


async def requests(
    arena: Arena, update_id: str, start: int, size: int
) -> AsyncIterator[weights_pb2.UploadChunksRequest]:
    """The chunks of shard 0 from byte `start` on."""
    for offset, view in arena.chunks(start, size):
        data = bytes(view)
        yield weights_pb2.UploadChunksRequest(
            update_id=update_id, shard=0, offset=offset, data=data, crc32c=google_crc32c.value(data)
        )
