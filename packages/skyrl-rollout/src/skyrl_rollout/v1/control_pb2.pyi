import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from skyrl_rollout.v1 import generation_pb2 as _generation_pb2
from skyrl_rollout.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]

class Admission(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMISSION_UNSPECIFIED: _ClassVar[Admission]
    ADMISSION_QUEUE: _ClassVar[Admission]
    ADMISSION_REJECT: _ClassVar[Admission]

class KvPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_POLICY_UNSPECIFIED: _ClassVar[KvPolicy]
    KV_POLICY_RECOMPUTE: _ClassVar[KvPolicy]
    KV_POLICY_RETAIN: _ClassVar[KvPolicy]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_PAUSING: _ClassVar[EngineState]
    ENGINE_STATE_PAUSED: _ClassVar[EngineState]
    ENGINE_STATE_COMMITTING: _ClassVar[EngineState]
    ENGINE_STATE_ASLEEP: _ClassVar[EngineState]
    ENGINE_STATE_AWAITING_WEIGHTS: _ClassVar[EngineState]
    ENGINE_STATE_POISONED: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
ADMISSION_UNSPECIFIED: Admission
ADMISSION_QUEUE: Admission
ADMISSION_REJECT: Admission
KV_POLICY_UNSPECIFIED: KvPolicy
KV_POLICY_RECOMPUTE: KvPolicy
KV_POLICY_RETAIN: KvPolicy
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_PAUSING: EngineState
ENGINE_STATE_PAUSED: EngineState
ENGINE_STATE_COMMITTING: EngineState
ENGINE_STATE_ASLEEP: EngineState
ENGINE_STATE_AWAITING_WEIGHTS: EngineState
ENGINE_STATE_POISONED: EngineState
ENGINE_STATE_DRAINING: EngineState

class AcquireControlRequest(_message.Message):
    __slots__ = ("owner", "claim_epoch")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CLAIM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    owner: str
    claim_epoch: int
    def __init__(self, owner: _Optional[str] = ..., claim_epoch: _Optional[int] = ...) -> None: ...

class AcquireControlResponse(_message.Message):
    __slots__ = ("trainer_epoch", "previous_epoch", "previous_owner")
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_OWNER_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    previous_epoch: int
    previous_owner: str
    def __init__(self, trainer_epoch: _Optional[int] = ..., previous_epoch: _Optional[int] = ..., previous_owner: _Optional[str] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("trainer_epoch", "op_id")
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    op_id: str
    def __init__(self, trainer_epoch: _Optional[int] = ..., op_id: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("fence", "mode", "admission", "lease")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    mode: PauseMode
    admission: Admission
    lease: _duration_pb2.Duration
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., mode: _Optional[_Union[PauseMode, str]] = ..., admission: _Optional[_Union[Admission, str]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("pause_id", "aborted", "frozen", "weight_version")
    PAUSE_ID_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    pause_id: str
    aborted: int
    frozen: int
    weight_version: int
    def __init__(self, pause_id: _Optional[str] = ..., aborted: _Optional[int] = ..., frozen: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("fence", "pause_id")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_ID_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    pause_id: str
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., pause_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("weight_version",)
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    def __init__(self, weight_version: _Optional[int] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ("fence", "preempt_running", "include_external")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_RUNNING_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    preempt_running: bool
    include_external: bool
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., preempt_running: bool = ..., include_external: bool = ...) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("blocks_freed",)
    BLOCKS_FREED_FIELD_NUMBER: _ClassVar[int]
    blocks_freed: int
    def __init__(self, blocks_freed: _Optional[int] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("fence", "level")
    class Level(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LEVEL_UNSPECIFIED: _ClassVar[SleepRequest.Level]
        LEVEL_OFFLOAD: _ClassVar[SleepRequest.Level]
        LEVEL_DISCARD: _ClassVar[SleepRequest.Level]
    LEVEL_UNSPECIFIED: SleepRequest.Level
    LEVEL_OFFLOAD: SleepRequest.Level
    LEVEL_DISCARD: SleepRequest.Level
    FENCE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    level: SleepRequest.Level
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., level: _Optional[_Union[SleepRequest.Level, str]] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("bytes_freed",)
    BYTES_FREED_FIELD_NUMBER: _ClassVar[int]
    bytes_freed: int
    def __init__(self, bytes_freed: _Optional[int] = ...) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ("fence", "weights", "kv_cache")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    weights: bool
    kv_cache: bool
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., weights: bool = ..., kv_cache: bool = ...) -> None: ...

class WakeUpResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    def __init__(self, state: _Optional[_Union[EngineState, str]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ("client_minor", "client_build")
    CLIENT_MINOR_FIELD_NUMBER: _ClassVar[int]
    CLIENT_BUILD_FIELD_NUMBER: _ClassVar[int]
    client_minor: int
    client_build: str
    def __init__(self, client_minor: _Optional[int] = ..., client_build: _Optional[str] = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("protocol_minor", "server_build", "instance_id", "model", "capabilities", "limits", "shm_namespace_id", "world_size", "weight_versions", "highest_trainer_epoch")
    class WeightVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    SERVER_BUILD_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SHM_NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_minor: int
    server_build: str
    instance_id: str
    model: ModelInfo
    capabilities: Capabilities
    limits: Limits
    shm_namespace_id: str
    world_size: int
    weight_versions: _containers.ScalarMap[str, int]
    highest_trainer_epoch: int
    def __init__(self, protocol_minor: _Optional[int] = ..., server_build: _Optional[str] = ..., instance_id: _Optional[str] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., shm_namespace_id: _Optional[str] = ..., world_size: _Optional[int] = ..., weight_versions: _Optional[_Mapping[str, int]] = ..., highest_trainer_epoch: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "tokenizer_digest", "vocab_size", "max_context", "eos_token_ids", "dtype", "tensor_layout_digest", "tensors")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    tokenizer_digest: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: _tensor_pb2.ScalarType
    tensor_layout_digest: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[TensorLayout]
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[_tensor_pb2.ScalarType, str]] = ..., tensor_layout_digest: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[TensorLayout, _Mapping]]] = ...) -> None: ...

class TensorLayout(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _tensor_pb2.ScalarType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.ScalarType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("logprob_modes", "pause_modes", "kv_policies", "transports", "staged_updates", "lora", "delta", "extras", "per_token_versions", "stop_strings", "deterministic_seed", "backend_options", "score", "sleep", "reset_cache", "prompt_logprobs", "abort", "priority")
    LOGPROB_MODES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODES_FIELD_NUMBER: _ClassVar[int]
    KV_POLICIES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    STAGED_UPDATES_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_SEED_FIELD_NUMBER: _ClassVar[int]
    BACKEND_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    RESET_CACHE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    logprob_modes: _containers.RepeatedScalarFieldContainer[_generation_pb2.LogprobMode]
    pause_modes: _containers.RepeatedScalarFieldContainer[PauseMode]
    kv_policies: _containers.RepeatedScalarFieldContainer[KvPolicy]
    transports: _containers.RepeatedScalarFieldContainer[str]
    staged_updates: bool
    lora: bool
    delta: bool
    extras: _containers.RepeatedScalarFieldContainer[_generation_pb2.Extra]
    per_token_versions: bool
    stop_strings: bool
    deterministic_seed: bool
    backend_options: _containers.RepeatedScalarFieldContainer[str]
    score: bool
    sleep: bool
    reset_cache: bool
    prompt_logprobs: bool
    abort: bool
    priority: bool
    def __init__(self, logprob_modes: _Optional[_Iterable[_Union[_generation_pb2.LogprobMode, str]]] = ..., pause_modes: _Optional[_Iterable[_Union[PauseMode, str]]] = ..., kv_policies: _Optional[_Iterable[_Union[KvPolicy, str]]] = ..., transports: _Optional[_Iterable[str]] = ..., staged_updates: bool = ..., lora: bool = ..., delta: bool = ..., extras: _Optional[_Iterable[_Union[_generation_pb2.Extra, str]]] = ..., per_token_versions: bool = ..., stop_strings: bool = ..., deterministic_seed: bool = ..., backend_options: _Optional[_Iterable[str]] = ..., score: bool = ..., sleep: bool = ..., reset_cache: bool = ..., prompt_logprobs: bool = ..., abort: bool = ..., priority: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_chunk_bytes", "max_concurrent", "max_top_logprobs", "request_id_retention", "keepalive_min_interval_ms")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_RETENTION_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_chunk_bytes: int
    max_concurrent: int
    max_top_logprobs: int
    request_id_retention: _duration_pb2.Duration
    keepalive_min_interval_ms: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_chunk_bytes: _Optional[int] = ..., max_concurrent: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., request_id_retention: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., keepalive_min_interval_ms: _Optional[int] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("instance_id", "state", "weight_versions", "running", "waiting", "frozen", "kv_usage", "tokens_generated", "open_update_id", "step_counter")
    class WeightVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    OPEN_UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTER_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    state: EngineState
    weight_versions: _containers.ScalarMap[str, int]
    running: int
    waiting: int
    frozen: int
    kv_usage: float
    tokens_generated: int
    open_update_id: str
    step_counter: int
    def __init__(self, instance_id: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., weight_versions: _Optional[_Mapping[str, int]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., frozen: _Optional[int] = ..., kv_usage: _Optional[float] = ..., tokens_generated: _Optional[int] = ..., open_update_id: _Optional[str] = ..., step_counter: _Optional[int] = ...) -> None: ...
