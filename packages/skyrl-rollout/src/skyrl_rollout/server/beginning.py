"""What a BeginUpdate asks for: read from its message, and held against the served model and what this server offers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from skyrl_rollout import wire
from skyrl_rollout.errors import InvalidRequest, MissingCapability, ModelMismatch, WrongState
from skyrl_rollout.server import convert
from skyrl_rollout.server.adapters import adapter_of, check_adapter
from skyrl_rollout.server.deltas import num_changed
from skyrl_rollout.server.engine import CollectiveTransfer, Engine, EngineCapabilities
from skyrl_rollout.server.leases import checked_lease
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.updates import Update
from skyrl_rollout.v1 import weights_pb2 as pb
from skyrl_rollout.weights.file import folder_below
from skyrl_rollout.weights.manifest import Manifest, differences
from skyrl_rollout.weights.shm import namespace_id

DEFAULT_LEASE_S = 300.0
MAX_UPDATE_ID = 200
MAX_VERSION = 1 << 62  # callers keep versions in signed 64 bits, and there is always a next one
MAX_SHARDS = 1024
DIGEST_BYTES = 16
IPC_HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)
COMPRESSIONS = {pb.COMPRESSION_NONE: "none", pb.COMPRESSION_ZSTD: "zstd"}
CUDA_IPC = "cuda_ipc"
_DEVICE_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z./-]{1,100}")


def transports(offers: EngineCapabilities, options: ServerOptions) -> list[str]:
    """By which transports this server takes weights."""
    kit = {"inline": True, "shm": bool(namespace_id()), "file": options.update_root is not None}
    return [*(name for name, offered in kit.items() if offered), *offers.collectives]


def update_from_pb(request: pb.BeginUpdateRequest, engine: Engine, options: ServerOptions) -> Update:
    """Raises InvalidRequest, ModelMismatch naming every tensor that does not fit, MissingCapability, or WrongState for
    shared memory of elsewhere; nothing has happened then."""
    if not 0 < len(request.update_id) <= MAX_UPDATE_ID:
        raise InvalidRequest(f"update_id must have 1 to {MAX_UPDATE_ID} characters: mint a UUID for every update")
    lease_s = checked_lease(convert.seconds(request, "lease", DEFAULT_LEASE_S) or DEFAULT_LEASE_S)
    _check_kind(request.manifest, engine.capabilities, options)
    manifest = wire.manifest_from_pb(request.manifest)
    update = Update(request.update_id, manifest, request.transport.WhichOneof("kind") or "", lease_s=lease_s)
    read = TRANSPORTS.get(update.transport)
    if read is None:
        raise InvalidRequest(f"transport is missing: set one of {', '.join(transports(engine.capabilities, options))}")
    read(update, request, engine.capabilities, options)
    _check_tensors(update, engine)
    if manifest.digest != request.manifest.digest:
        raise InvalidRequest(
            f"manifest.digest is {request.manifest.digest.hex() or 'empty'}, that of the manifest's tensors is "
            f"{manifest.digest.hex()}: compute it as weights.proto says at WeightManifest.digest"
        )
    return update


def _check_kind(m: pb.WeightManifest, offers: EngineCapabilities, options: ServerOptions) -> None:
    kind = m.WhichOneof("kind")
    if kind == "lora" and not offers.lora:
        raise MissingCapability.named("lora", "updating an adapter")
    if kind == "overwrite" and not options.delta:
        raise MissingCapability.named("delta", "a delta update")
    if kind is None or (kind == "full" and m.full.naming not in ("", "hf")):
        raise InvalidRequest("manifest.kind must be full with naming 'hf' (as in the checkpoint), overwrite or lora")
    if kind == "overwrite" and m.overwrite.index_encoding != wire.INDEX_ENCODING:
        raise InvalidRequest(
            f"overwrite.index_encoding is {m.overwrite.index_encoding!r}, expected {wire.INDEX_ENCODING!r}"
        )
    if (kind == "overwrite") != m.HasField("base_version"):
        raise InvalidRequest("base_version goes with an overwrite delta: it names the version that is changed")
    if (kind == "lora") != bool(m.policy_id):
        raise InvalidRequest("policy_id goes with an adapter: it names it, and the base policy is ''")
    if not 1 <= m.target_version <= MAX_VERSION:
        raise InvalidRequest(f"manifest.target_version must be 1 to {MAX_VERSION}: version 0 is the model as loaded")


def _check_tensors(update: Update, engine: Engine) -> None:
    manifest = update.manifest
    names = Counter(t.layout.name for t in manifest.tensors)
    if not names:
        raise InvalidRequest("the manifest names no tensor: name every one that the update brings")
    if twice := sorted(name for name, times in names.items() if times > 1):
        raise InvalidRequest(f"manifest.tensors has {', '.join(twice[:5])} twice: name every tensor once")
    _KIND_CHECKS[manifest.kind](manifest, engine)
    # what the engine receives by itself cannot be checked here, so its digests may be left out
    lengths = {DIGEST_BYTES} if update.is_staged else {0, DIGEST_BYTES}
    bad = [t.layout.name for t in manifest.tensors if len(t.content_digest) not in lengths]
    if bad:
        raise InvalidRequest(
            f"content_digest of {', '.join(bad[:5])} must be {DIGEST_BYTES} bytes: the xxh3-128 of the tensor's bytes"
        )
    if (shards := len(manifest.shard_nbytes())) > MAX_SHARDS:
        raise InvalidRequest(f"the manifest has {shards} shards, at most {MAX_SHARDS} are taken")
    _check_overlap(manifest)


def _check_full(manifest: Manifest, engine: Engine) -> None:
    _refuse_differences(differences((t.layout for t in manifest.tensors), engine.identity.tensors))


def _check_overwrite(manifest: Manifest, engine: Engine) -> None:
    named = {t.layout.name for t in manifest.tensors}
    changed = [t for t in engine.identity.tensors if t.name in named]
    _refuse_differences(differences((t.layout for t in manifest.tensors), changed))
    for t in manifest.tensors:
        num_changed(t.layout, t.nbytes)


def _check_lora(manifest: Manifest, engine: Engine) -> None:
    check_adapter(manifest, engine.identity)
    engine.check_adapter(adapter_of(manifest), [t.layout for t in manifest.tensors])


_KIND_CHECKS = {"full": _check_full, "overwrite": _check_overwrite, "lora": _check_lora}


def _refuse_differences(wrong: Sequence[str]) -> None:
    if wrong:
        raise ModelMismatch(
            f"{len(wrong)} tensors do not fit the served model: {'; '.join(wrong[:3])}",
            violations=[("manifest.tensors[" + w.split(":", 1)[0] + "]", w) for w in wrong],
        )


def _check_overlap(manifest: Manifest) -> None:
    ends: dict[int, tuple[int, str]] = {}
    for t in sorted(manifest.tensors, key=lambda t: (t.shard, t.offset)):
        end, before = ends.get(t.shard, (0, ""))
        if t.offset < end:
            raise InvalidRequest(
                f"tensors {before} and {t.layout.name} overlap in shard {t.shard}: place them one after another"
            )
        ends[t.shard] = (t.offset + t.nbytes, t.layout.name)


def _inline(update: Update, request: pb.BeginUpdateRequest, offers: EngineCapabilities, options: ServerOptions) -> None:
    update.compression = convert.known(request.compression, COMPRESSIONS, "compression", unset="none")


def _shm(update: Update, request: pb.BeginUpdateRequest, offers: EngineCapabilities, options: ServerOptions) -> None:
    here, shm = namespace_id(), request.transport.shm
    _need_transport("shm", offers, options)
    if shm.namespace_id != here:
        raise WrongState(
            f"the shared memory is of namespace {shm.namespace_id!r}, this server sees {here!r}: "
            f"use the inline transport between hosts"
        )
    named, needed = {s.shard: s.name for s in shm.segments}, set(update.manifest.shard_nbytes())
    update.segments = {shard: name for shard, name in named.items() if shard in needed}
    if missing := sorted(needed - set(named)):
        raise InvalidRequest(f"transport.shm names no segment for shards {missing[:20]}: give one for every shard")


def _file(update: Update, request: pb.BeginUpdateRequest, offers: EngineCapabilities, options: ServerOptions) -> None:
    _need_transport("file", offers, options)
    assert options.update_root is not None
    update.folder = folder_below(request.transport.file.uri, options.update_root)


def _collective(
    update: Update, request: pb.BeginUpdateRequest, offers: EngineCapabilities, options: ServerOptions
) -> None:
    t = request.transport.collective
    _need_transport(t.backend or "nccl", offers, options, among=[c for c in offers.collectives if c != CUDA_IPC])
    first_free = t.rank_offset + options.world_size
    for holds, said in (
        (0 < len(t.master_addr) <= 253, "master_addr must name the trainer's host"),
        (0 < t.master_port < 1 << 16, f"master_port is {t.master_port}, expected 1 to 65535"),
        (t.rank_offset >= 1, "rank_offset must be at least 1: rank 0 is the trainer"),
        (
            first_free <= t.world_size,
            f"this server takes ranks {t.rank_offset} to {first_free - 1}, world_size is {t.world_size}",
        ),
    ):
        if not holds:
            raise InvalidRequest(f"transport.collective: {said}")
    update.transfer = CollectiveTransfer(t.backend or "nccl", t.master_addr, t.master_port, t.world_size, t.rank_offset)
    _need_every_tensor(update)


def _cuda_ipc(
    update: Update, request: pb.BeginUpdateRequest, offers: EngineCapabilities, options: ServerOptions
) -> None:
    _need_transport(CUDA_IPC, offers, options)
    handles = request.transport.cuda_ipc.handles
    for h in handles:
        if len(h.handle) != IPC_HANDLE_BYTES or not _DEVICE_UUID.fullmatch(h.device_uuid):
            raise InvalidRequest(
                f"the handle of {h.tensor} must be {IPC_HANDLE_BYTES} bytes and its device_uuid like 'GPU-...', got "
                f"{len(h.handle)} bytes and {h.device_uuid!r}"
            )
    if len({h.tensor for h in handles}) != len(handles):
        raise InvalidRequest("transport.cuda_ipc holds a tensor twice")
    named, wanted = {h.tensor for h in handles}, {t.layout.name for t in update.manifest.tensors}
    if named != wanted:
        odd = sorted(named ^ wanted)
        raise InvalidRequest(f"transport.cuda_ipc must hold every tensor of the manifest and no other: {odd[:5]}")
    update.transfer = CollectiveTransfer(
        CUDA_IPC, handles={h.tensor: (h.device_uuid, h.handle, h.offset) for h in handles}
    )
    _need_every_tensor(update)


TRANSPORTS = {"inline": _inline, "shm": _shm, "file": _file, "collective": _collective, "cuda_ipc": _cuda_ipc}


def _need_transport(
    name: str, offers: EngineCapabilities, options: ServerOptions, *, among: Sequence[str] | None = None
) -> None:
    if name not in (transports(offers, options) if among is None else among):
        raise MissingCapability.named("transports", f"the transport {name!r}")


def _need_every_tensor(update: Update) -> None:
    if update.manifest.kind != "full":
        raise InvalidRequest(
            "a transport straight into the live weights carries every tensor: send deltas and adapters another way"
        )
