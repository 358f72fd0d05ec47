import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from skyrl_rollout.v1 import control_pb2 as _control_pb2
from skyrl_rollout.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_NONE: _ClassVar[Compression]
    COMPRESSION_ZSTD: _ClassVar[Compression]

class UpdateState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_STATE_UNSPECIFIED: _ClassVar[UpdateState]
    UPDATE_STATE_OPEN: _ClassVar[UpdateState]
    UPDATE_STATE_SEALED: _ClassVar[UpdateState]
    UPDATE_STATE_COMMITTING: _ClassVar[UpdateState]
    UPDATE_STATE_COMMITTED: _ClassVar[UpdateState]
    UPDATE_STATE_ABORTED: _ClassVar[UpdateState]
    UPDATE_STATE_FAILED: _ClassVar[UpdateState]
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_NONE: Compression
COMPRESSION_ZSTD: Compression
UPDATE_STATE_UNSPECIFIED: UpdateState
UPDATE_STATE_OPEN: UpdateState
UPDATE_STATE_SEALED: UpdateState
UPDATE_STATE_COMMITTING: UpdateState
UPDATE_STATE_COMMITTED: UpdateState
UPDATE_STATE_ABORTED: UpdateState
UPDATE_STATE_FAILED: UpdateState

class WeightManifest(_message.Message):
    __slots__ = ("policy_id", "target_version", "base_version", "tensors", "digest", "full", "overwrite", "lora")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    target_version: int
    base_version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    digest: bytes
    full: FullWeights
    overwrite: OverwriteDelta
    lora: LoraWeights
    def __init__(self, policy_id: _Optional[str] = ..., target_version: _Optional[int] = ..., base_version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., digest: _Optional[bytes] = ..., full: _Optional[_Union[FullWeights, _Mapping]] = ..., overwrite: _Optional[_Union[OverwriteDelta, _Mapping]] = ..., lora: _Optional[_Union[LoraWeights, _Mapping]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "shard", "offset", "nbytes", "content_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _tensor_pb2.ScalarType
    shape: _containers.RepeatedScalarFieldContainer[int]
    shard: int
    offset: int
    nbytes: int
    content_digest: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.ScalarType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., shard: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., content_digest: _Optional[bytes] = ...) -> None: ...

class FullWeights(_message.Message):
    __slots__ = ("naming",)
    NAMING_FIELD_NUMBER: _ClassVar[int]
    naming: str
    def __init__(self, naming: _Optional[str] = ...) -> None: ...

class OverwriteDelta(_message.Message):
    __slots__ = ("index_encoding",)
    INDEX_ENCODING_FIELD_NUMBER: _ClassVar[int]
    index_encoding: str
    def __init__(self, index_encoding: _Optional[str] = ...) -> None: ...

class LoraWeights(_message.Message):
    __slots__ = ("base_fingerprint", "rank", "alpha", "target_modules")
    BASE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    base_fingerprint: str
    rank: int
    alpha: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, base_fingerprint: _Optional[str] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginUpdateRequest(_message.Message):
    __slots__ = ("fence", "update_id", "manifest", "transport", "compression", "lease")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    fence: _control_pb2.Fence
    update_id: str
    manifest: WeightManifest
    transport: Transport
    compression: Compression
    lease: _duration_pb2.Duration
    def __init__(self, fence: _Optional[_Union[_control_pb2.Fence, _Mapping]] = ..., update_id: _Optional[str] = ..., manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., transport: _Optional[_Union[Transport, _Mapping]] = ..., compression: _Optional[_Union[Compression, str]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Transport(_message.Message):
    __slots__ = ("inline", "shm", "file", "collective", "cuda_ipc")
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    inline: InlineTransport
    shm: ShmTransport
    file: FileTransport
    collective: CollectiveTransport
    cuda_ipc: CudaIpcTransport
    def __init__(self, inline: _Optional[_Union[InlineTransport, _Mapping]] = ..., shm: _Optional[_Union[ShmTransport, _Mapping]] = ..., file: _Optional[_Union[FileTransport, _Mapping]] = ..., collective: _Optional[_Union[CollectiveTransport, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcTransport, _Mapping]] = ...) -> None: ...

class InlineTransport(_message.Message):
    __slots__ = ("chunk_bytes",)
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    chunk_bytes: int
    def __init__(self, chunk_bytes: _Optional[int] = ...) -> None: ...

class ShmTransport(_message.Message):
    __slots__ = ("namespace_id", "segments")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: str
    segments: _containers.RepeatedCompositeFieldContainer[ShmSegment]
    def __init__(self, namespace_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[ShmSegment, _Mapping]]] = ...) -> None: ...

class ShmSegment(_message.Message):
    __slots__ = ("shard", "name", "nbytes")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    name: str
    nbytes: int
    def __init__(self, shard: _Optional[int] = ..., name: _Optional[str] = ..., nbytes: _Optional[int] = ...) -> None: ...

class FileTransport(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class CollectiveTransport(_message.Message):
    __slots__ = ("backend", "master_addr", "master_port", "world_size", "rank_offset")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDR_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    backend: str
    master_addr: str
    master_port: int
    world_size: int
    rank_offset: int
    def __init__(self, backend: _Optional[str] = ..., master_addr: _Optional[str] = ..., master_port: _Optional[int] = ..., world_size: _Optional[int] = ..., rank_offset: _Optional[int] = ...) -> None: ...

class CudaIpcTransport(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedCompositeFieldContainer[CudaIpcHandle]
    def __init__(self, handles: _Optional[_Iterable[_Union[CudaIpcHandle, _Mapping]]] = ...) -> None: ...

class CudaIpcHandle(_message.Message):
    __slots__ = ("tensor", "device_uuid", "handle", "offset")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    device_uuid: str
    handle: bytes
    offset: int
    def __init__(self, tensor: _Optional[str] = ..., device_uuid: _Optional[str] = ..., handle: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("state", "staged", "chunk_bytes", "max_parallel_shards")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    state: UpdateState
    staged: bool
    chunk_bytes: int
    max_parallel_shards: int
    def __init__(self, state: _Optional[_Union[UpdateState, str]] = ..., staged: bool = ..., chunk_bytes: _Optional[int] = ..., max_parallel_shards: _Optional[int] = ...) -> None: ...

class UploadChunksRequest(_message.Message):
    __slots__ = ("update_id", "shard", "offset", "data", "crc32c")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    shard: int
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, update_id: _Optional[str] = ..., shard: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class UploadChunksResponse(_message.Message):
    __slots__ = ("shard", "durable_offset")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DURABLE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    shard: int
    durable_offset: int
    def __init__(self, shard: _Optional[int] = ..., durable_offset: _Optional[int] = ...) -> None: ...

class PullUpdateRequest(_message.Message):
    __slots__ = ("fence", "update_id")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    fence: _control_pb2.Fence
    update_id: str
    def __init__(self, fence: _Optional[_Union[_control_pb2.Fence, _Mapping]] = ..., update_id: _Optional[str] = ...) -> None: ...

class PullUpdateResponse(_message.Message):
    __slots__ = ("phase", "bytes_done", "bytes_total")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[PullUpdateResponse.Phase]
        PHASE_READY: _ClassVar[PullUpdateResponse.Phase]
        PHASE_PROGRESS: _ClassVar[PullUpdateResponse.Phase]
        PHASE_SOURCE_RELEASED: _ClassVar[PullUpdateResponse.Phase]
    PHASE_UNSPECIFIED: PullUpdateResponse.Phase
    PHASE_READY: PullUpdateResponse.Phase
    PHASE_PROGRESS: PullUpdateResponse.Phase
    PHASE_SOURCE_RELEASED: PullUpdateResponse.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    phase: PullUpdateResponse.Phase
    bytes_done: int
    bytes_total: int
    def __init__(self, phase: _Optional[_Union[PullUpdateResponse.Phase, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class SealUpdateRequest(_message.Message):
    __slots__ = ("fence", "update_id")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    fence: _control_pb2.Fence
    update_id: str
    def __init__(self, fence: _Optional[_Union[_control_pb2.Fence, _Mapping]] = ..., update_id: _Optional[str] = ...) -> None: ...

class SealUpdateResponse(_message.Message):
    __slots__ = ("state", "manifest_digest")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    state: UpdateState
    manifest_digest: bytes
    def __init__(self, state: _Optional[_Union[UpdateState, str]] = ..., manifest_digest: _Optional[bytes] = ...) -> None: ...

class CommitUpdateRequest(_message.Message):
    __slots__ = ("fence", "update_id", "expected_version", "mode", "kv", "stay_paused")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    STAY_PAUSED_FIELD_NUMBER: _ClassVar[int]
    fence: _control_pb2.Fence
    update_id: str
    expected_version: int
    mode: _control_pb2.PauseMode
    kv: _control_pb2.KvPolicy
    stay_paused: bool
    def __init__(self, fence: _Optional[_Union[_control_pb2.Fence, _Mapping]] = ..., update_id: _Optional[str] = ..., expected_version: _Optional[int] = ..., mode: _Optional[_Union[_control_pb2.PauseMode, str]] = ..., kv: _Optional[_Union[_control_pb2.KvPolicy, str]] = ..., stay_paused: bool = ...) -> None: ...

class CommitUpdateResponse(_message.Message):
    __slots__ = ("weight_version", "previous_version", "frozen", "aborted", "stall")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_VERSION_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    previous_version: int
    frozen: int
    aborted: int
    stall: _duration_pb2.Duration
    def __init__(self, weight_version: _Optional[int] = ..., previous_version: _Optional[int] = ..., frozen: _Optional[int] = ..., aborted: _Optional[int] = ..., stall: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AbortUpdateRequest(_message.Message):
    __slots__ = ("fence", "update_id")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    fence: _control_pb2.Fence
    update_id: str
    def __init__(self, fence: _Optional[_Union[_control_pb2.Fence, _Mapping]] = ..., update_id: _Optional[str] = ...) -> None: ...

class AbortUpdateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: UpdateState
    def __init__(self, state: _Optional[_Union[UpdateState, str]] = ...) -> None: ...

class GetUpdateRequest(_message.Message):
    __slots__ = ("update_id",)
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    def __init__(self, update_id: _Optional[str] = ...) -> None: ...

class GetUpdateResponse(_message.Message):
    __slots__ = ("state", "durable_offsets", "weight_version")
    class DurableOffsetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    state: UpdateState
    durable_offsets: _containers.ScalarMap[int, int]
    weight_version: int
    def __init__(self, state: _Optional[_Union[UpdateState, str]] = ..., durable_offsets: _Optional[_Mapping[int, int]] = ..., weight_version: _Optional[int] = ...) -> None: ...
