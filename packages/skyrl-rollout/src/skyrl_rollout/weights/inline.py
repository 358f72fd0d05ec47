"""Weights as chunks on gRPC streams of their own: dense offsets, a crc32c each, resumed where the server stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import google_crc32c
import grpc.aio
import numpy as np
import zstandard

from skyrl_rollout.v1 import weights_pb2
from skyrl_rollout.weights.arena import Arena

MAX_CHUNK_BYTES = 1 << 20  # larger ones stall the server's other calls and save nothing
COMPRESSIONS = {"none": weights_pb2.COMPRESSION_NONE, "zstd": weights_pb2.COMPRESSION_ZSTD}
ZSTD_LEVEL = 1  # weights are nearly noise: more effort finds nothing more
# What grpc.aio says, as INTERNAL, where the server ended a stream while a message was being written: its real status
# is then lost.
LOST_STATUS = "Internal error from Core"

_UPLOAD = f"/{weights_pb2.DESCRIPTOR.services_by_name['WeightService'].full_name}/UploadChunks"
_DATA_TAG = weights_pb2.UploadChunksRequest.DATA_FIELD_NUMBER << 3 | 2  # length-delimited


def chunk_bytes(*limits: int, compression: str = "none") -> int:
    """The largest chunk that every side takes; 0 is no opinion. Bytes that do not compress grow a little."""
    size = min([MAX_CHUNK_BYTES, *(limit for limit in limits if limit > 0)])
    return size if compression == "none" else size - size // 128 - 64


def upload_call(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryMultiCallable:
    """`UploadChunks` that takes messages as bytes: a chunk is then copied once on its way to the socket, not thrice."""
    return channel.stream_unary(
        _UPLOAD,
        request_serializer=None,
        response_deserializer=weights_pb2.UploadChunksResponse.FromString,
    )


async def messages(
    arena: Arena, update_id: str, shard: int, start: int, *, size: int, compression: str
) -> AsyncIterator[bytes]:
    """The serialised UploadChunksRequests of a shard from byte `start` on."""
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    for offset, view in arena.chunks(shard, start, size):
        data = view if compression == "none" else await asyncio.to_thread(packer.compress, view)
        yield message(update_id, shard, offset, data)


def message(update_id: str, shard: int, offset: int, data: bytes | memoryview) -> bytes:
    """One serialised UploadChunksRequest: the other fields by protobuf, then the tag, length and bytes of `data`."""
    crc32c = google_crc32c.value(np.frombuffer(data, np.uint8))  # of a memoryview it would need a copy
    head = weights_pb2.UploadChunksRequest(update_id=update_id, shard=shard, offset=offset, crc32c=crc32c)
    return b"".join((head.SerializeToString(), bytes([_DATA_TAG]), _varint(len(data)), data))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
