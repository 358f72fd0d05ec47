"""Who this server is, what it offers and how it is doing, as the messages that say so."""

from __future__ import annotations

from typing import Any

from skyrl_rollout import wire
from skyrl_rollout.protocol import PROTOCOL_MINOR
from skyrl_rollout.server import convert
from skyrl_rollout.server.beginning import transports
from skyrl_rollout.server.engine import EngineCapabilities, ModelIdentity
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.parts import ServerParts
from skyrl_rollout.v1 import control_pb2 as pb
from skyrl_rollout.weights.manifest import fingerprint, layout_digest
from skyrl_rollout.weights.shm import namespace_id


def server_info(parts: ServerParts) -> pb.GetServerInfoResponse:
    """The answer to GetServerInfo."""
    engine, state, options = parts.engine, parts.state, parts.options
    return pb.GetServerInfoResponse(
        protocol_minor=PROTOCOL_MINOR,
        server_build=options.server_build,
        instance_id=state.instance_id,
        model=_model(engine.identity),
        capabilities=_capabilities(engine.capabilities, options),
        limits=pb.Limits(
            max_message_bytes=options.max_message_bytes,
            max_chunk_bytes=options.max_chunk_bytes,
            max_concurrent=options.max_concurrent,
            max_top_logprobs=engine.capabilities.max_top_logprobs,
            request_id_retention=convert.duration(options.request_retention_s),
            keepalive_min_interval_ms=options.keepalive_min_interval_ms,
        ),
        shm_namespace_id=namespace_id(),
        world_size=options.world_size,
        weight_versions=state.versions,
        highest_trainer_epoch=parts.guard.fencing.epoch,
    )


def status(parts: ServerParts) -> pb.WatchStatusResponse:
    """One report of WatchStatus. running, waiting and frozen count requests."""
    state, runs, load = parts.state, parts.runs, parts.engine.load()
    frozen, live = runs.frozen, parts.updater.book.live
    return pb.WatchStatusResponse(
        instance_id=state.instance_id,
        state=convert.number(state.state),
        weight_versions=state.versions,
        running=runs.running - frozen,
        waiting=runs.waiting,
        frozen=frozen,
        kv_usage=load.kv_usage,
        tokens_generated=runs.tokens_generated,
        open_update_id=live.update_id if live else "",
        step_counter=load.step_counter,
    )


def _model(model: ModelIdentity) -> pb.ModelInfo:
    dtype: Any = wire.SCALAR_TYPES[model.dtype]
    return pb.ModelInfo(
        name=model.name,
        fingerprint=fingerprint(model.tensors),
        tokenizer_digest=model.tokenizer_digest,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        eos_token_ids=model.eos_token_ids,
        dtype=dtype,
        tensor_layout_digest=layout_digest(model.tensors),
        tensors=[wire.layout_to_pb(t) for t in model.tensors],
    )


def _capabilities(offers: EngineCapabilities, options: ServerOptions) -> pb.Capabilities:
    return pb.Capabilities(
        logprob_modes=[convert.number(mode) for mode in offers.logprob_modes],
        pause_modes=[wire.PAUSE_MODES[mode] for mode in offers.pause_modes],
        kv_policies=[wire.KV_POLICIES[policy] for policy in offers.kv_policies],
        transports=transports(offers, options),
        staged_updates=True,
        per_token_versions=True,
        stop_strings=offers.stop_strings,
        deterministic_seed=offers.deterministic_seed,
        extras=[wire.EXTRAS[name] for name in offers.extras],
        backend_options=offers.backend_options,
        score=offers.score,
        prompt_logprobs=offers.prompt_logprobs,
        priority=offers.priority,
        reset_cache=offers.reset_cache,
        sleep=bool(offers.sleep_levels),
        lora=offers.lora,
        delta=options.delta,
        abort=True,
    )
