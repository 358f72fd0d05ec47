"""What a server is doing at one moment: state, versions and load."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_rollout.v1 import control_pb2


@dataclass(frozen=True)
class ServerStatus:
    """state: "loading", "serving", "pausing", "paused", "committing", "asleep", "awaiting_weights", "poisoned",
    "draining" or "unknown". step_counter: grows with every engine step; frozen while work runs means wedged."""

    instance_id: str
    state: str
    weight_versions: dict[str, int]
    running: int
    waiting: int
    frozen: int
    kv_usage: float
    tokens_generated: int
    open_update_id: str
    step_counter: int


_STATES = {v.number: v.name.removeprefix("ENGINE_STATE_").lower() for v in control_pb2.EngineState.DESCRIPTOR.values}


def status_from_pb(pb: control_pb2.WatchStatusResponse) -> ServerStatus:
    """A state that this side does not know reads "unknown"."""
    return ServerStatus(
        instance_id=pb.instance_id,
        state=_STATES.get(pb.state, "unknown").replace("unspecified", "unknown"),
        weight_versions=dict(pb.weight_versions),
        running=pb.running,
        waiting=pb.waiting,
        frozen=pb.frozen,
        kv_usage=pb.kv_usage,
        tokens_generated=pb.tokens_generated,
        open_update_id=pb.open_update_id,
        step_counter=pb.step_counter,
    )
