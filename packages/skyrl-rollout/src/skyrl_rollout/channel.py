"""How a url becomes a gRPC channel: grpc://host:port, grpcs://host:port or unix:///path; anything else is refused."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

import grpc.aio

from skyrl_rollout.rotating_channel import RotatingChannel
from skyrl_rollout.security import Credentials

FORMS = "grpc://host:port, grpcs://host:port or unix:///path/to/socket"
MAX_MESSAGE_BYTES = 64 << 20  # what this side accepts; a receiver must raise gRPC's 4 MiB itself
KEEPALIVE_INTERVAL_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000


@dataclass(frozen=True)
class Endpoint:
    """url: as given. target: what gRPC dials. scheme: "grpc", "grpcs" or "unix"."""

    url: str
    target: str
    scheme: str

    @property
    def is_local(self) -> bool:
        """Whether bytes stay on this host: a unix socket or a loopback address."""
        if self.scheme == "unix":
            return True
        host = self.target.rpartition(":")[0].strip("[]")
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def parse_url(url: str) -> Endpoint:
    """Raises ValueError with the right form for a url that is not one of grpc://, grpcs://, unix:."""
    scheme, colon, rest = url.partition(":")
    if scheme == "unix" and rest and rest.strip("/"):
        path = rest[2:] if rest.startswith("//") else rest
        return Endpoint(url, f"unix:{path}", "unix")
    if scheme in ("http", "https") and colon:
        right = f"{'grpcs' if scheme == 'https' else 'grpc'}://{rest.lstrip('/').split('/')[0]}"
        raise ValueError(f"{url} is an HTTP address, and a rollout server speaks gRPC: write {right}")
    match = re.fullmatch(r"(grpcs?)://(\[[0-9a-fA-F:.]+\]|[^/:@\s]+):(\d{1,5})/?", url)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{url!r} is not the url of a rollout server: write {FORMS}")
    return Endpoint(url, f"{match[2]}:{match[3]}", match[1])


def open_channel(
    url: str, credentials: Credentials | None = None, *, keepalive_interval_ms: int = KEEPALIVE_INTERVAL_MS
) -> grpc.aio.Channel:
    """A channel with a connection of its own, so that bulk bytes on one never delay another. Nothing is dialled yet.

    credentials: None takes what the environment names. Those read from files are read again when the files change: new
    calls then go over a new connection. Raises ValueError for a bad url, and for a bearer token that would cross a
    network in clear text.
    """
    endpoint, shown = parse_url(url), Credentials.from_environment() if credentials is None else credentials
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", keepalive_interval_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else a minute, whatever the line above says
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),  # retried by us, where the time left and the request id are known
    ]
    if endpoint.scheme != "grpcs":
        if shown.token is not None and not endpoint.is_local:
            raise ValueError(f"a bearer token would cross the network in clear text to {url}: use grpcs://")
        return grpc.aio.insecure_channel(endpoint.target, options=options)

    def dial() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(endpoint.target, shown.read_again().tls(), options=options)

    return dial() if shown.files is None else RotatingChannel(dial, shown.files.stamp)
