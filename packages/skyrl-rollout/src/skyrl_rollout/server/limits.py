"""How long and how many a caller's fields may be where nothing else bounds them: checked before any handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.server.answers import refuse
from skyrl_rollout.server.interception import AroundEachCall


@dataclass(frozen=True)
class Bound:
    """field: with dots into a message. most: in `unit`, which is "s", "characters" or "entries"."""

    field: str
    most: int
    unit: str

    def excess(self, message: Any) -> int | float | None:
        """How much the field holds where that is more than `most`, else None."""
        for name in self.field.split("."):
            message = getattr(message, name)
        held = message.ToNanoseconds() / 1e9 if isinstance(message, Duration) else len(message)
        return held if held > self.most else None


_ID = 200
# What belongs to one feature is checked where that is: leases, ids of requests and updates, stop strings, samples.
BOUNDS: Mapping[str, tuple[Bound, ...]] = {
    "RolloutService/Generate": (
        Bound("policy_id", _ID, "characters"),
        Bound("session_id", _ID, "characters"),
        Bound("cache.salt", 1024, "characters"),
        Bound("stream.heartbeat", 3600, "s"),
        Bound("stream.max_event_delay", 3600, "s"),
        Bound("detach_grace", 3600, "s"),
        Bound("sampling.stop_token_ids", 1024, "entries"),
        Bound("sampling.stop_strings", 64, "entries"),
        Bound("sampling.logit_bias", 1024, "entries"),
        Bound("extras", 64, "entries"),
        Bound("backend_options.fields", 64, "entries"),
    ),
    "RolloutService/Score": (Bound("policy_id", _ID, "characters"),),
    "RolloutService/AbortGenerations": (
        Bound("request_ids", 65_536, "entries"),
        Bound("reason", 1000, "characters"),
    ),
    "EngineService/AcquireControl": (Bound("owner", _ID, "characters"),),
    "EngineService/GetServerInfo": (Bound("client_build", _ID, "characters"),),
    "EngineService/WatchStatus": (Bound("interval", 3600, "s"),),
    "EngineService/Pause": (Bound("lease", 24 * 3600, "s"),),
    "EngineService/Resume": (Bound("pause_id", _ID, "characters"),),
    "WeightService/BeginUpdate": (
        Bound("lease", 24 * 3600, "s"),
        Bound("manifest.tensors", 1_000_000, "entries"),
        Bound("transport.shm.segments", 1024, "entries"),
    ),
    "WeightService/PullUpdate": (Bound("update_id", _ID, "characters"),),
    "WeightService/SealUpdate": (Bound("update_id", _ID, "characters"),),
    "WeightService/CommitUpdate": (Bound("update_id", _ID, "characters"),),
    "WeightService/AbortUpdate": (Bound("update_id", _ID, "characters"),),
    "WeightService/GetUpdate": (Bound("update_id", _ID, "characters"),),
}


class BoundEachCall(AroundEachCall):
    """Refuses a call with INVALID_ARGUMENT and the bound."""

    @asynccontextmanager
    async def around(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        violations = [] if request is None else exceeded(method.rpartition(".")[2], request)
        if violations:
            await refuse(
                context, InvalidRequest("; ".join(f"{f} {said}" for f, said in violations), violations=violations)
            )
        yield


def exceeded(method: str, request: Any) -> list[tuple[str, str]]:
    """(field, what is wrong) for every field beyond its bound. method: "Service/Name"."""
    return [
        (bound.field, f"has {held:g} {bound.unit}, at most {bound.most} are taken")
        for bound in BOUNDS.get(method, ())
        if (held := bound.excess(request)) is not None
    ]


def table() -> str:
    """The table of docs/limits.md."""
    rows = ["| call | field | at most |", "|---|---|---|"]
    rows += [f"| `{m}` | `{b.field}` | {b.most} {b.unit} |" for m, bounds in BOUNDS.items() for b in bounds]
    return "\n".join(rows) + "\n"
