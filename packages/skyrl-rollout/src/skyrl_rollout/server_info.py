"""Who a server says it is: model, capabilities, limits and committed versions, as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, fields

from skyrl_rollout import wire
from skyrl_rollout.errors import MissingCapability
from skyrl_rollout.tokens import LogprobMode
from skyrl_rollout.v1 import control_pb2, generation_pb2
from skyrl_rollout.weights.manifest import TensorLayout


@dataclass(frozen=True)
class ServedModel:
    """tensors: what every full update must carry, in the server's order. dtype: "f32", "bf16", ..."""

    name: str
    fingerprint: str
    tokenizer_digest: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    tensors: tuple[TensorLayout, ...]


@dataclass(frozen=True)
class ServerCapabilities:
    """What the server really does; the names are those of the protocol's Capabilities."""

    logprob_modes: tuple[LogprobMode, ...]
    pause_modes: tuple[str, ...]
    kv_policies: tuple[str, ...]
    transports: tuple[str, ...]
    extras: tuple[str, ...]
    backend_options: tuple[str, ...]
    staged_updates: bool
    lora: bool
    delta: bool
    per_token_versions: bool
    stop_strings: bool
    deterministic_seed: bool
    score: bool
    sleep: bool
    reset_cache: bool
    prompt_logprobs: bool
    abort: bool
    priority: bool

    def need(self, capability: str, what: str, *, among: object = None) -> None:
        """Raises MissingCapability unless `capability` is offered (or lists `among`), before anything is sent."""
        offered = getattr(self, capability)
        if not (offered if among is None else among in offered):
            raise MissingCapability.named(capability, what)


@dataclass(frozen=True)
class ServerLimits:
    """Bounds that a caller meets; 0 where the server names none."""

    max_message_bytes: int
    max_chunk_bytes: int
    max_concurrent: int
    max_top_logprobs: int
    request_id_retention_s: float
    keepalive_min_interval_ms: int


@dataclass(frozen=True)
class ServerInfo:
    """The answer to GetServerInfo. weight_versions: policy_id -> committed version, "" being the base policy."""

    url: str
    protocol_minor: int
    server_build: str
    instance_id: str
    model: ServedModel
    capabilities: ServerCapabilities
    limits: ServerLimits
    shm_namespace_id: str
    world_size: int
    weight_versions: dict[str, int]
    highest_trainer_epoch: int

    @property
    def weight_version(self) -> int:
        """The committed version of the base policy; 0 is the model as loaded."""
        return self.weight_versions.get("", 0)


def info_from_pb(pb: control_pb2.GetServerInfoResponse, url: str) -> ServerInfo:
    """Enum values that this side does not know are left out: a feature nobody here can ask for."""
    return ServerInfo(
        url=url,
        protocol_minor=pb.protocol_minor,
        server_build=pb.server_build,
        instance_id=pb.instance_id,
        model=_model(pb.model),
        capabilities=_capabilities(pb.capabilities),
        limits=_limits(pb.limits),
        shm_namespace_id=pb.shm_namespace_id,
        world_size=pb.world_size,
        weight_versions=dict(pb.weight_versions),
        highest_trainer_epoch=pb.highest_trainer_epoch,
    )


def _model(pb: control_pb2.ModelInfo) -> ServedModel:
    return ServedModel(
        name=pb.name,
        fingerprint=pb.fingerprint,
        tokenizer_digest=pb.tokenizer_digest,
        vocab_size=pb.vocab_size,
        max_context=pb.max_context,
        eos_token_ids=tuple(pb.eos_token_ids),
        dtype=wire.DTYPE_NAMES.get(pb.dtype, ""),
        tensors=tuple(wire.layout_from_pb(t) for t in pb.tensors),
    )


def _capabilities(pb: control_pb2.Capabilities) -> ServerCapabilities:
    names = {number: name for name, number in wire.PAUSE_MODES.items()}
    kv_names = {number: name for name, number in wire.KV_POLICIES.items()}
    extra_names = generation_pb2.Extra.DESCRIPTOR.values_by_number
    flags = [f.name for f in fields(ServerCapabilities) if f.type == "bool"]
    return ServerCapabilities(
        logprob_modes=tuple(LogprobMode(m) for m in pb.logprob_modes if m in tuple(LogprobMode)),
        pause_modes=tuple(names[m] for m in pb.pause_modes if m in names),
        kv_policies=tuple(kv_names[k] for k in pb.kv_policies if k in kv_names),
        transports=tuple(pb.transports),
        extras=tuple(extra_names[e].name.removeprefix("EXTRA_").lower() for e in pb.extras if e in extra_names),
        backend_options=tuple(pb.backend_options),
        **{flag: getattr(pb, flag) for flag in flags},
    )


def _limits(pb: control_pb2.Limits) -> ServerLimits:
    return ServerLimits(
        max_message_bytes=pb.max_message_bytes,
        max_chunk_bytes=pb.max_chunk_bytes,
        max_concurrent=pb.max_concurrent,
        max_top_logprobs=pb.max_top_logprobs,
        request_id_retention_s=pb.request_id_retention.ToNanoseconds() / 1e9,
        keepalive_min_interval_ms=pb.keepalive_min_interval_ms,
    )
