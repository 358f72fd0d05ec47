"""A client that knows of a server only what it says about itself: reflection, and no stub or helper of this project."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import grpc
import xxhash
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

PACKAGE = "skyrl_rollout.v1"
DETAILS = "grpc-status-details-bin"
CALL_S = 10.0


@dataclass(frozen=True)
class Refusal:
    """How a call failed. code: "INVALID_ARGUMENT", ... reason, metadata: of ErrorInfo. fields: those of BadRequest."""

    code: str
    message: str
    domain: str
    reason: str
    metadata: Mapping[str, str]
    fields: tuple[str, ...]


class ReflectedClient:
    """One channel, and the messages and methods that the server describes. token: of every call, "" for none."""

    def __init__(self, address: str, *, token: str = "", described_by: ReflectedClient | None = None) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._database = ProtoReflectionDescriptorDatabase(self.channel)
        self._pool = DescriptorPool(self._database) if described_by is None else described_by._pool

    def close(self) -> None:
        self.channel.close()

    def services(self) -> list[str]:
        """Those of the protocol."""
        return sorted(name for name in self._database.get_services() if name.startswith(PACKAGE))

    def methods(self) -> list[str]:
        """ "RolloutService/Generate", ..."""
        return [
            f"{name.removeprefix(PACKAGE + '.')}/{method}"
            for name in self.services()
            for method in self._pool.FindServiceByName(name).methods_by_name
        ]

    def method(self, name: str) -> Any:
        """The descriptor of "Service/Method"."""
        service, _, method = name.partition("/")
        return self._pool.FindServiceByName(f"{PACKAGE}.{service}").methods_by_name[method]

    def message(self, method: str, fields: Mapping[str, Any]) -> Any:
        """The request of a method."""
        return GetMessageClass(self.method(method).input_type)(**fields)

    def scalar_type(self, number: int) -> str:
        """ "f32" and so on: the name of a ScalarType as digests have it."""
        values = self._pool.FindEnumTypeByName(f"{PACKAGE}.ScalarType").values_by_number
        return values[number].name.removeprefix("SCALAR_TYPE_").lower()

    def call(self, method: str, *requests: Mapping[str, Any] | bytes) -> list[Any]:
        """Everything that is answered. A request is its fields, or the bytes to send. Raises RpcError."""
        d = self.method(method)
        kind = {
            (False, False): self.channel.unary_unary, (False, True): self.channel.unary_stream,
            (True, False): self.channel.stream_unary, (True, True): self.channel.stream_stream,
        }[d.client_streaming, d.server_streaming]  # fmt: skip
        stub = kind(f"/{PACKAGE}.{method}", response_deserializer=GetMessageClass(d.output_type).FromString)
        data = [r if isinstance(r, bytes) else self.message(method, r).SerializeToString() for r in requests]
        answer = stub(iter(data) if d.client_streaming else data[0], timeout=CALL_S, metadata=self._metadata)
        return list(answer) if d.server_streaming else [answer]

    def refusal(self, method: str, *requests: Mapping[str, Any] | bytes) -> Refusal | None:
        """How the call failed, None where it succeeded."""
        try:
            self.call(method, *requests)
        except grpc.RpcError as error:
            return _read(error)
        return None


def _read(error: Any) -> Refusal:
    status = status_pb2.Status()
    status.ParseFromString(dict(error.trailing_metadata() or ()).get(DETAILS, b""))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
    fields = tuple(violation.field for violation in bad.field_violations)
    return Refusal(error.code().name, error.details() or "", info.domain, info.reason, dict(info.metadata), fields)


@dataclass(frozen=True)
class Named:
    """One tensor of an update. dtype: number of its ScalarType. data: all its bytes. sent: what travels of a delta."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    data: bytes
    sent: bytes | None = None

    @property
    def shard_bytes(self) -> bytes:
        return self.data if self.sent is None else self.sent


class Owner:
    """A trainer: the epoch that it was given, and updates made by hand."""

    def __init__(self, client: ReflectedClient) -> None:
        self.client = client
        [reply] = client.call("EngineService/AcquireControl", {"owner": "a client of others"})
        self.epoch = reply.trainer_epoch

    def fence(self) -> dict[str, Any]:
        """What goes with every order."""
        return {"trainer_epoch": self.epoch, "op_id": str(uuid.uuid4())}

    def info(self) -> Any:
        """The answer to GetServerInfo."""
        return self.client.call("EngineService/GetServerInfo", {})[0]

    def version(self) -> int:
        """The committed version of the base."""
        return int(self.info().weight_versions[""])

    def tensors(self, seed: int) -> list[Named]:
        """Every tensor of the served model; each byte but the last of a value is `seed`, so that they are finite."""
        made = []
        for t in self.info().model.tensors:
            count, item = _product(t.shape), 4 if self.client.scalar_type(t.dtype) == "f32" else 2
            made.append(Named(t.name, t.dtype, tuple(t.shape), (bytes([seed]) * (item - 1) + b"\x3c") * count))
        return made

    def manifest(self, version: int, tensors: Sequence[Named], **more: Any) -> dict[str, Any]:
        """All tensors one after another in shard 0, with the digest that the protocol describes."""
        specs, offset, digest = [], 0, xxhash.xxh3_128()
        for t in tensors:
            content = xxhash.xxh3_128_digest(t.data)
            shape = ",".join(map(str, t.shape))
            digest.update(f"{t.name}\0{self.client.scalar_type(t.dtype)}\0{shape}\0".encode() + content)
            specs.append(
                {"name": t.name, "dtype": t.dtype, "shape": t.shape, "offset": offset, "nbytes": len(t.shard_bytes),
                 "content_digest": content}
            )  # fmt: skip
            offset += len(t.shard_bytes)
        kind = {} if {"lora", "overwrite"} & set(more) else {"full": {"naming": "hf"}}
        return {"target_version": version, "tensors": specs, "digest": digest.digest(), **kind, **more}

    def beginning(self, manifest: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """The fields of BeginUpdate, under a new id unless one is given."""
        given = {"update_id": str(uuid.uuid4()), "transport": {"inline": {}}, "fence": self.fence()}
        return {**given, "manifest": manifest, **more}

    def begin(self, manifest: Mapping[str, Any], **more: Any) -> str:
        """Begins an update and returns its id."""
        fields = self.beginning(manifest, **more)
        self.client.call("WeightService/BeginUpdate", fields)
        return str(fields["update_id"])

    def upload(self, update_id: str, data: bytes) -> None:
        """The whole of shard 0."""
        step = self.info().limits.max_chunk_bytes
        chunks = [chunk(update_id, i, data[i : i + step]) for i in range(0, len(data), step)]
        self.client.call("WeightService/UploadChunks", *chunks)

    def order(self, update_id: str, **more: Any) -> dict[str, Any]:
        """The fields of SealUpdate, AbortUpdate, PullUpdate and CommitUpdate."""
        return {"fence": self.fence(), "update_id": update_id, **more}

    def publish(self, tensors: Sequence[Named], version: int, *, over: int, **more: Any) -> None:
        """Begin, upload, seal, commit."""
        update_id = self.begin(self.manifest(version, tensors, **more))
        self.upload(update_id, shard_of(tensors))
        self.client.call("WeightService/SealUpdate", self.order(update_id))
        self.client.call("WeightService/CommitUpdate", self.order(update_id, expected_version=over))

    def abort(self, update_id: str) -> None:
        self.client.call("WeightService/AbortUpdate", self.order(update_id))


def shard_of(tensors: Iterable[Named]) -> bytes:
    """The bytes of shard 0."""
    return b"".join(t.shard_bytes for t in tensors)


def chunk(update_id: str, offset: int, data: bytes, **more: Any) -> dict[str, Any]:
    """The fields of one UploadChunks message."""
    return {"update_id": update_id, "offset": offset, "data": data, "crc32c": google_crc32c.value(data), **more}


def _product(numbers: Iterable[int]) -> int:
    product = 1
    for n in numbers:
        product *= n
    return product
