"""Which minor version of skyrl_rollout.v1 this build speaks, and whether a server's fits."""

from __future__ import annotations

from importlib.metadata import version

from skyrl_rollout.errors import ProtocolMismatch

MAJOR = 1
PROTOCOL_MINOR = 0  # grows with every field or RPC that is added to v1
NEEDED_SERVER_MINOR = 0  # an older server lacks something that every trainer uses


def build() -> str:
    """What this side calls itself in a handshake."""
    return f"skyrl-rollout {version('skyrl-rollout')}"


def check_server(server_minor: int, server_build: str, url: str, *, needed_minor: int = NEEDED_SERVER_MINOR) -> None:
    """v1 only grows, so a newer server fits; an older one fits down to `needed_minor`. Raises ProtocolMismatch."""
    if server_minor < needed_minor:
        raise ProtocolMismatch(
            f"the server at {url} speaks protocol {MAJOR}.{server_minor} ({server_build}), this client "
            f"({build()}, protocol {MAJOR}.{PROTOCOL_MINOR}) needs {MAJOR}.{needed_minor}: upgrade the server"
        )
