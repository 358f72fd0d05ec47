"""Whether a server serves, asked from code that has no event loop."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skyrl_rollout.channel import parse_url


def is_serving(url: str, *, timeout_s: float = 1.0) -> bool:
    """One check of grpc.health.v1 over plain gRPC; False where nothing answers. ValueError for a bad url."""
    with grpc.insecure_channel(parse_url(url).target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING
