"""Random messages of the protocol: built field by field from the descriptors, then damaged byte by byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from raw_updates import chunk, draft, forcing
from skyrl_rollout import wire
from skyrl_rollout.v1 import control_pb2, generation_pb2, weights_pb2

METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for module in (generation_pb2, control_pb2, weights_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
"""Every RPC of the protocol."""

EPOCH = 7  # stands for the epoch that the server knows, or nothing behind the fence would be reached
UPDATE = "an update"
NAMES = (
    "",
    UPDATE,
    "a",
    "b",
    "x" * 300,
    "canary.weight",
    "i32",
    "hf",
    "gloo",
    "file:///etc",
    "../../etc/passwd",
    "\0",
    "é",
)
NUMBERS = (0, 1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e30, float("inf"), float("nan"))
BLOBS = (b"", b"\0", b"\0" * 16, b"\xff" * 16, np.arange(8, dtype="<i4").tobytes(), b"\x80\x04cos\nsystem\n.")
MAX_DEPTH = 4

_KINDS = FieldDescriptor
_INTEGERS = {
    _KINDS.TYPE_UINT32: (0, 2**32 - 1),
    _KINDS.TYPE_FIXED32: (0, 2**32 - 1),
    _KINDS.TYPE_UINT64: (0, 2**64 - 1),
    _KINDS.TYPE_INT32: (-(2**31), 2**31 - 1),
    _KINDS.TYPE_SINT32: (-(2**31), 2**31 - 1),
    _KINDS.TYPE_INT64: (-(2**63), 2**63 - 1),
}


def _valid() -> dict[str, Message]:
    """RPC -> a request that a fresh canary server honours, or would after the ones before it."""
    d = draft(1, forcing(5))
    sampling = generation_pb2.SamplingParams(max_tokens=4)
    fence = control_pb2.Fence(trainer_epoch=EPOCH, op_id="op")
    return {
        "Generate": generation_pb2.GenerateRequest(request_id="a", prompt_token_ids=BLOBS[4], sampling=sampling),
        "Score": generation_pb2.ScoreRequest(request_id="a", token_ids=BLOBS[4], score_from=1),
        "AbortGenerations": generation_pb2.AbortGenerationsRequest(request_ids=["a"]),
        "Pause": control_pb2.PauseRequest(fence=fence, mode=control_pb2.PAUSE_MODE_KEEP, lease={"nanos": 10**8}),
        "Resume": control_pb2.ResumeRequest(fence=fence),
        "ResetCache": control_pb2.ResetCacheRequest(fence=fence),
        "Sleep": control_pb2.SleepRequest(fence=fence, level=control_pb2.SleepRequest.LEVEL_OFFLOAD),
        "WakeUp": control_pb2.WakeUpRequest(fence=fence, weights=True, kv_cache=True),
        "BeginUpdate": weights_pb2.BeginUpdateRequest(
            fence=fence,
            update_id=UPDATE,
            manifest=wire.manifest_to_pb(d.manifest),
            transport=weights_pb2.Transport(inline=weights_pb2.InlineTransport()),
        ),
        "UploadChunks": chunk(d, 0, len(d.shard), update_id=UPDATE),
        "PullUpdate": weights_pb2.PullUpdateRequest(fence=fence, update_id=UPDATE),
        "SealUpdate": weights_pb2.SealUpdateRequest(fence=fence, update_id=UPDATE),
        "CommitUpdate": weights_pb2.CommitUpdateRequest(fence=fence, update_id=UPDATE),
        "AbortUpdate": weights_pb2.AbortUpdateRequest(fence=fence, update_id=UPDATE),
        "GetUpdate": weights_pb2.GetUpdateRequest(update_id=UPDATE),
    }


@st.composite
def requests(draw: st.DrawFn, method: MethodDescriptor) -> Message:
    """A request of that RPC: a valid one, one that some fields of are absurd, or one that is absurd altogether."""
    valid, absurd = VALID.get(method.name), draw(messages(method.input_type))
    if valid is None or draw(st.integers(0, 3)) == 0:
        return absurd
    made = type(valid)()
    made.CopyFrom(valid)
    if draw(st.booleans()):
        for field, value in absurd.ListFields()[:2]:
            made.ClearField(field.name)
            if not field.is_repeated:
                _place(made, field, value)
    return made


def _place(made: Message, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None:
        getattr(made, field.name).CopyFrom(value)
    else:
        setattr(made, field.name, value)


def with_epoch(message: Message, epoch: int) -> Message:
    """The message with its epoch, where that is EPOCH, replaced by `epoch`."""
    if "fence" in message.DESCRIPTOR.fields_by_name and message.fence.trainer_epoch == EPOCH:
        message.fence.trainer_epoch = epoch
    return message


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message of that type with any of its fields set to typical, extreme or absurd values."""
    made = message_factory.GetMessageClass(descriptor)()
    if not descriptor.fields or depth > MAX_DEPTH:
        return made
    for field in draw(st.lists(st.sampled_from(tuple(descriptor.fields)), unique_by=lambda f: f.number)):
        _set(draw, made, field, depth)
    return made


def _set(draw: st.DrawFn, made: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        if value.message_type is None:
            getattr(made, field.name)[_scalar(draw, key)] = _scalar(draw, value)
    elif field.message_type is not None:
        inner = draw(messages(field.message_type, depth + 1))
        place = getattr(made, field.name)
        (place.add() if field.is_repeated else place).MergeFrom(inner)
    elif field.is_repeated:
        getattr(made, field.name).extend(_scalar(draw, field) for _ in range(draw(st.integers(0, 3))))
    else:
        setattr(made, field.name, _scalar(draw, field))


def _scalar(draw: st.DrawFn, field: FieldDescriptor) -> Any:
    if field.name in ("trainer_epoch", "claim_epoch"):
        return draw(st.sampled_from((0, EPOCH, EPOCH, EPOCH)))
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        return draw(st.sampled_from([n for n in (*NUMBERS, -1) if low <= n <= high]))
    if field.type == _KINDS.TYPE_ENUM:
        return draw(st.integers(-1, 12))
    if field.type == _KINDS.TYPE_BOOL:
        return draw(st.booleans())
    if field.type in (_KINDS.TYPE_FLOAT, _KINDS.TYPE_DOUBLE):
        return draw(st.sampled_from(FLOATS))
    if field.type == _KINDS.TYPE_STRING:
        return draw(st.sampled_from(NAMES))
    assert field.type == _KINDS.TYPE_BYTES, field.full_name
    return draw(st.sampled_from(BLOBS) | st.binary(max_size=64))


def damaged(whole: bytes, seed: int, count: int) -> Iterator[bytes]:
    """`count` variants of serialized bytes, each with one to four damages; the same for the same seed."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            chance.choice(DAMAGES)(data, chance)
        yield bytes(data)


def _flip(data: bytearray, chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    data[at:at] = chance.randbytes(chance.randint(1, 8))


def _delete(data: bytearray, chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    del data[at : at + chance.randint(1, 8)]


def _repeat(data: bytearray, chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    data[at:at] = data[at : at + chance.randint(1, 32)] * chance.randint(1, 4)


def _truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randint(0, len(data)) :]


def _huge_varint(data: bytearray, chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    data[at : at + 1] = b"\xff" * 9 + b"\x01"


DAMAGES = (_flip, _insert, _delete, _repeat, _truncate, _huge_varint)
VALID = _valid()
