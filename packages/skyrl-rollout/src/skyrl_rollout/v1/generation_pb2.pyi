import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from skyrl_rollout.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROB_MODE_UNSPECIFIED: _ClassVar[LogprobMode]
    LOGPROB_MODE_RAW: _ClassVar[LogprobMode]
    LOGPROB_MODE_TEMPERATURE: _ClassVar[LogprobMode]
    LOGPROB_MODE_SAMPLING: _ClassVar[LogprobMode]

class Extra(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXTRA_UNSPECIFIED: _ClassVar[Extra]
    EXTRA_ROUTED_EXPERTS: _ClassVar[Extra]
    EXTRA_TOP_P_TOKEN_IDS: _ClassVar[Extra]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_PAUSED: _ClassVar[FinishReason]
    FINISH_REASON_VERSION_CHANGED: _ClassVar[FinishReason]
LOGPROB_MODE_UNSPECIFIED: LogprobMode
LOGPROB_MODE_RAW: LogprobMode
LOGPROB_MODE_TEMPERATURE: LogprobMode
LOGPROB_MODE_SAMPLING: LogprobMode
EXTRA_UNSPECIFIED: Extra
EXTRA_ROUTED_EXPERTS: Extra
EXTRA_TOP_P_TOKEN_IDS: Extra
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_PAUSED: FinishReason
FINISH_REASON_VERSION_CHANGED: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "logprobs", "num_samples", "policy_id", "version", "cache", "session_id", "priority", "stream", "detach_grace", "resume_after", "extras", "backend_options")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    DETACH_GRACE_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: bytes
    sampling: SamplingParams
    logprobs: LogprobOptions
    num_samples: int
    policy_id: str
    version: VersionPolicy
    cache: CacheOptions
    session_id: str
    priority: int
    stream: StreamOptions
    detach_grace: _duration_pb2.Duration
    resume_after: int
    extras: _containers.RepeatedScalarFieldContainer[Extra]
    backend_options: _struct_pb2.Struct
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobOptions, _Mapping]] = ..., num_samples: _Optional[int] = ..., policy_id: _Optional[str] = ..., version: _Optional[_Union[VersionPolicy, _Mapping]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., session_id: _Optional[str] = ..., priority: _Optional[int] = ..., stream: _Optional[_Union[StreamOptions, _Mapping]] = ..., detach_grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resume_after: _Optional[int] = ..., extras: _Optional[_Iterable[_Union[Extra, str]]] = ..., backend_options: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "seed", "stop_token_ids", "stop_strings", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens: int
    ignore_eos: bool
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class LogprobOptions(_message.Message):
    __slots__ = ("mode", "top_k", "prompt_last_n")
    MODE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LAST_N_FIELD_NUMBER: _ClassVar[int]
    mode: LogprobMode
    top_k: int
    prompt_last_n: int
    def __init__(self, mode: _Optional[_Union[LogprobMode, str]] = ..., top_k: _Optional[int] = ..., prompt_last_n: _Optional[int] = ...) -> None: ...

class VersionPolicy(_message.Message):
    __slots__ = ("min_weight_version", "on_commit")
    class OnCommit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ON_COMMIT_UNSPECIFIED: _ClassVar[VersionPolicy.OnCommit]
        ON_COMMIT_CONTINUE: _ClassVar[VersionPolicy.OnCommit]
        ON_COMMIT_STOP: _ClassVar[VersionPolicy.OnCommit]
    ON_COMMIT_UNSPECIFIED: VersionPolicy.OnCommit
    ON_COMMIT_CONTINUE: VersionPolicy.OnCommit
    ON_COMMIT_STOP: VersionPolicy.OnCommit
    MIN_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ON_COMMIT_FIELD_NUMBER: _ClassVar[int]
    min_weight_version: int
    on_commit: VersionPolicy.OnCommit
    def __init__(self, min_weight_version: _Optional[int] = ..., on_commit: _Optional[_Union[VersionPolicy.OnCommit, str]] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("bypass", "salt")
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    bypass: bool
    salt: str
    def __init__(self, bypass: bool = ..., salt: _Optional[str] = ...) -> None: ...

class StreamOptions(_message.Message):
    __slots__ = ("final_only", "min_tokens_per_event", "max_event_delay", "heartbeat")
    FINAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_PER_EVENT_FIELD_NUMBER: _ClassVar[int]
    MAX_EVENT_DELAY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    final_only: bool
    min_tokens_per_event: int
    max_event_delay: _duration_pb2.Duration
    heartbeat: _duration_pb2.Duration
    def __init__(self, final_only: bool = ..., min_tokens_per_event: _Optional[int] = ..., max_event_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("seq", "started", "delta", "sample_finished", "heartbeat")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    started: Started
    delta: TokenDelta
    sample_finished: SampleFinished
    heartbeat: Heartbeat
    def __init__(self, seq: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., sample_finished: _Optional[_Union[SampleFinished, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("instance_id", "weight_version", "effective", "mode", "cached_prompt_tokens", "prompt_logprobs", "prompt_token_digest", "crc32c")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    weight_version: int
    effective: SamplingParams
    mode: LogprobMode
    cached_prompt_tokens: int
    prompt_logprobs: bytes
    prompt_token_digest: bytes
    crc32c: int
    def __init__(self, instance_id: _Optional[str] = ..., weight_version: _Optional[int] = ..., effective: _Optional[_Union[SamplingParams, _Mapping]] = ..., mode: _Optional[_Union[LogprobMode, str]] = ..., cached_prompt_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[bytes] = ..., prompt_token_digest: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("sample_index", "offset", "token_ids", "logprobs", "weight_version", "oldest_kv_version", "top", "extras", "crc32c")
    class ExtrasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_KV_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    offset: int
    token_ids: bytes
    logprobs: bytes
    weight_version: int
    oldest_kv_version: int
    top: TopLogprobs
    extras: _containers.MessageMap[str, _tensor_pb2.Tensor]
    crc32c: int
    def __init__(self, sample_index: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., weight_version: _Optional[int] = ..., oldest_kv_version: _Optional[int] = ..., top: _Optional[_Union[TopLogprobs, _Mapping]] = ..., extras: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SampleFinished(_message.Message):
    __slots__ = ("sample_index", "reason", "num_tokens", "token_digest", "spans", "invalid_logprobs", "num_preemptions", "stop_token_id", "stop_string")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    INVALID_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    reason: FinishReason
    num_tokens: int
    token_digest: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    invalid_logprobs: int
    num_preemptions: int
    stop_token_id: int
    stop_string: str
    def __init__(self, sample_index: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., num_tokens: _Optional[int] = ..., token_digest: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., invalid_logprobs: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "length", "weight_version", "oldest_kv_version")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_KV_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    weight_version: int
    oldest_kv_version: int
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., weight_version: _Optional[int] = ..., oldest_kv_version: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("phase", "tokens_so_far")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[Heartbeat.Phase]
        PHASE_QUEUED: _ClassVar[Heartbeat.Phase]
        PHASE_RUNNING: _ClassVar[Heartbeat.Phase]
        PHASE_PAUSED: _ClassVar[Heartbeat.Phase]
    PHASE_UNSPECIFIED: Heartbeat.Phase
    PHASE_QUEUED: Heartbeat.Phase
    PHASE_RUNNING: Heartbeat.Phase
    PHASE_PAUSED: Heartbeat.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SO_FAR_FIELD_NUMBER: _ClassVar[int]
    phase: Heartbeat.Phase
    tokens_so_far: int
    def __init__(self, phase: _Optional[_Union[Heartbeat.Phase, str]] = ..., tokens_so_far: _Optional[int] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("k", "token_ids", "logprobs")
    K_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    k: int
    token_ids: bytes
    logprobs: bytes
    def __init__(self, k: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "score_from", "logprobs", "policy_id", "version", "temperature")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FROM_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: bytes
    score_from: int
    logprobs: LogprobOptions
    policy_id: str
    version: VersionPolicy
    temperature: float
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., score_from: _Optional[int] = ..., logprobs: _Optional[_Union[LogprobOptions, _Mapping]] = ..., policy_id: _Optional[str] = ..., version: _Optional[_Union[VersionPolicy, _Mapping]] = ..., temperature: _Optional[float] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("offset", "logprobs", "top", "weight_version", "crc32c")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    offset: int
    logprobs: bytes
    top: TopLogprobs
    weight_version: int
    crc32c: int
    def __init__(self, offset: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., top: _Optional[_Union[TopLogprobs, _Mapping]] = ..., weight_version: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class AbortGenerationsRequest(_message.Message):
    __slots__ = ("request_ids", "all", "reason")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    reason: str
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., all: bool = ..., reason: _Optional[str] = ...) -> None: ...

class AbortGenerationsResponse(_message.Message):
    __slots__ = ("aborted", "not_found")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    NOT_FOUND_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    not_found: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ..., not_found: _Optional[_Iterable[str]] = ...) -> None: ...
