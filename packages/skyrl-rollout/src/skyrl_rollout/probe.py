"""`skyrl-rollout probe URL`: who answers there, what it can do, within which limits, and how it is doing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from typing import Any

from skyrl_rollout.endpoint import add_endpoint_options, connect
from skyrl_rollout.protocol import MAJOR
from skyrl_rollout.server_info import ServerCapabilities, ServerInfo
from skyrl_rollout.status import ServerStatus

HELP = "show who a server is, what it can do and how it is doing"
EXAMPLES = """examples:
  skyrl-rollout probe grpc://127.0.0.1:50051
  skyrl-rollout probe grpcs://rollout.example:443 --ca ca.pem --token-file token --json"""
LABEL_WIDTH = 14


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_endpoint_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


async def run(args: argparse.Namespace) -> int:
    """Prints the report; 0 where the server serves, 1 where it cannot right now. Raises RolloutError."""
    async with await connect(args) as client:
        info, status = client.info, await client.status()
        healthy = await client.health()
    print(json.dumps(as_dict(info, status, healthy=healthy), indent=2) if args.json else text(info, status))
    return 0 if healthy else 1


def as_dict(info: ServerInfo, status: ServerStatus, *, healthy: bool) -> dict[str, Any]:
    """Everything that the server said, for a program; tensors are counted, not listed."""
    model = {**asdict(info.model), "tensors": len(info.model.tensors)}
    modes = [mode.name.lower() for mode in info.capabilities.logprob_modes]
    offers = {**asdict(info.capabilities), "logprob_modes": modes}
    return {
        "url": info.url,
        "protocol": f"{MAJOR}.{info.protocol_minor}",
        "server_build": info.server_build,
        "instance_id": info.instance_id,
        "healthy": healthy,
        "status": asdict(status),
        "model": model,
        "capabilities": offers,
        "limits": asdict(info.limits),
        "world_size": info.world_size,
        "shm_namespace_id": info.shm_namespace_id,
        "highest_trainer_epoch": info.highest_trainer_epoch,
    }


def text(info: ServerInfo, status: ServerStatus) -> str:
    """The same in a dozen lines."""
    model, limits = info.model, info.limits
    versions = ", ".join(f"{policy or 'base'} {version}" for policy, version in status.weight_versions.items())
    nbytes = sum(tensor.nbytes for tensor in model.tensors)
    rows = {
        "server": f"{info.server_build}, protocol {MAJOR}.{info.protocol_minor}, {info.url}",
        "instance": info.instance_id,
        "model": f"{model.name}, vocabulary {model.vocab_size}, context {model.max_context}, end tokens "
        f"{', '.join(map(str, model.eos_token_ids)) or 'none'}",
        "weights": f"{len(model.tensors)} tensors, {nbytes / 1e6:.1f} MB of {model.dtype}, fingerprint "
        f"{model.fingerprint}",
        "versions": versions,
        "state": status.state + (f", update {status.open_update_id} is open" if status.open_update_id else ""),
        "load": f"{status.running} running, {status.waiting} waiting, {status.frozen} frozen, "
        f"KV {status.kv_usage:.0%}, {status.tokens_generated} tokens so far, step {status.step_counter}",
        "limits": f"{limits.max_concurrent} requests, {limits.max_message_bytes} bytes a message, "
        f"{limits.max_chunk_bytes} a chunk, {limits.max_top_logprobs} top logprobs, answers kept "
        f"{limits.request_id_retention_s:g} s",
        "offers": ", ".join(offered(info.capabilities)),
        "lacks": ", ".join(lacking(info.capabilities)) or "nothing",
        "trainer": f"epoch {info.highest_trainer_epoch}, {info.world_size} ranks",
    }
    return "\n".join(f"{label:<{LABEL_WIDTH}}{said}" for label, said in rows.items())


def offered(offers: ServerCapabilities) -> list[str]:
    """Every capability that is listed, with its members."""
    said = []
    for field in fields(offers):
        value = getattr(offers, field.name)
        if isinstance(value, tuple) and value:
            said.append(f"{field.name} ({', '.join(getattr(v, 'name', str(v)).lower() for v in value)})")
        elif value is True:
            said.append(field.name)
    return said


def lacking(offers: ServerCapabilities) -> list[str]:
    """Every capability that is not."""
    return [field.name for field in fields(offers) if not getattr(offers, field.name)]
