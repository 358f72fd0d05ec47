"""Where a server listens and which limits it keeps: the flags that every rollout server has."""

from __future__ import annotations

import argparse
import ipaddress
import math
from dataclasses import dataclass, fields
from pathlib import Path

from skyrl_rollout.protocol import build

MIB = 1 << 20
ROLE_NAMES = ("rollout", "control")  # rollout: RolloutService, GetServerInfo, WatchStatus and health; control: all

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class ServerOptions:
    """listen: "host:port" (port 0: any free one) or "unix:path". Durations in seconds, sizes in bytes.

    client_roles: (common name of a client certificate, role). token_files: (role, file with one token). log_format:
    "text" or "json"; None leaves the process's logging as it is."""

    listen: str
    max_concurrent: int = 4096
    drain_grace_s: float = 10.0
    max_chunk_bytes: int = 1 * MIB
    max_message_bytes: int = 32 * MIB
    request_retention_s: float = 120.0
    retained_bytes: int = 256 * MIB
    keepalive_min_interval_ms: int = 500
    wedged_after_s: float = 60.0
    world_size: int = 1
    max_adapters: int = 8
    delta: bool = False
    update_root: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    client_roles: tuple[tuple[str, str], ...] = ()
    token_files: tuple[tuple[str, Path], ...] = ()
    metrics_listen: str | None = None
    log_format: str | None = None
    otel_endpoint: str | None = None
    server_build: str = build()

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together: give both or none")
        self._check_roles()
        self._check_watchers()
        if not (64 * 1024 <= self.max_chunk_bytes <= 4 * MIB):
            raise ValueError(f"--max-chunk-bytes is {self.max_chunk_bytes}, expected 65536 to {4 * MIB}")
        for name in ("drain_grace_s", "request_retention_s", "wedged_after_s"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} is {seconds}, expected a number of seconds")
        for name in ("max_concurrent", "max_adapters"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {count}, expected at least 1")
        if self.update_root is not None and not (self.update_root.is_absolute() and self.update_root.is_dir()):
            raise ValueError(f"--update-root {self.update_root} is not the absolute path of a folder")
        if self.tls_certificate is None and not self.is_local:
            raise ValueError(
                f"--listen {self.listen} can be reached from other machines: give --tls-certificate and --tls-key, "
                f"or listen on 127.0.0.1 or unix:PATH"
            )

    def _check_watchers(self) -> None:
        if self.log_format not in (None, *LOG_FORMATS):
            raise ValueError(f"--log-format is {self.log_format!r}, expected one of {', '.join(LOG_FORMATS)}")
        if self.metrics_listen is not None and not self.metrics_are_local and self.tls_certificate is None:
            raise ValueError(
                f"--metrics-listen {self.metrics_listen} can be reached from other machines: give "
                f"--tls-certificate and --tls-key, or listen on 127.0.0.1"
            )

    def _check_roles(self) -> None:
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("--tls-client-ca needs --tls-certificate and --tls-key: clients are asked over TLS only")
        if self.client_roles and self.tls_client_ca is None:
            raise ValueError("--client-role needs --tls-client-ca: names are taken from verified certificates only")
        for flag, role in (
            *(("--token-file", role) for role, _ in self.token_files),
            *(("--client-role", role) for _, role in self.client_roles),
        ):
            if role not in ROLE_NAMES:
                raise ValueError(f"{flag}: {role!r} is no role, expected one of {', '.join(ROLE_NAMES)}")

    @property
    def unix_path(self) -> Path | None:
        return (
            Path(self.listen.removeprefix("unix:").replace("///", "/", 1)) if self.listen.startswith("unix:") else None
        )

    @property
    def host_port(self) -> tuple[str, int]:
        """Raises ValueError where `listen` is not host:port."""
        found = _host_port(self.listen)
        if found is None:
            raise ValueError(f"--listen {self.listen!r} is not an address: write host:port (127.0.0.1:0) or unix:PATH")
        return found

    @property
    def is_local(self) -> bool:
        return self.unix_path is not None or _is_loopback(self.host_port[0])

    @property
    def metrics_host_port(self) -> tuple[str, int]:
        """Raises ValueError where `metrics_listen` is not host:port."""
        found = _host_port(self.metrics_listen or "")
        if found is None:
            raise ValueError(f"--metrics-listen {self.metrics_listen!r} is not an address: write host:port")
        return found

    @property
    def metrics_are_local(self) -> bool:
        return _is_loopback(self.metrics_host_port[0])


def _host_port(address: str) -> tuple[str, int] | None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `ServerOptions`; `options_from` reads them back."""
    defaults = {f.name: f.default for f in fields(ServerOptions)}
    group = parser.add_argument_group("serving")
    group.add_argument("--listen", required=True, metavar="ADDR", help="host:port (port 0: any) or unix:PATH")
    for name, kind, text in (
        ("max_concurrent", int, "requests that may be queued or running"),
        ("drain_grace_s", float, "how long running requests may go on after SIGTERM"),
        ("max_chunk_bytes", int, "largest chunk of an inline weight update"),
        ("max_message_bytes", int, "largest gRPC message"),
        ("request_retention_s", float, "how long a finished request can be replayed"),
        ("wedged_after_s", float, "NOT_SERVING when work runs but no engine step happens for so long"),
        ("max_adapters", int, "low-rank adapters that are loaded at the same time"),
        ("update_root", Path, "take weights also from files, in folders below this one"),
        ("tls_certificate", Path, "PEM file; needed to listen beyond this machine"),
        ("tls_key", Path, "PEM file of the certificate's private key"),
        ("tls_client_ca", Path, "PEM file: let in only clients whose certificate these sign (mTLS)"),
        ("metrics_listen", str, "host:port: serve OpenMetrics there; over TLS beyond this machine"),
        ("otel_endpoint", str, "send a trace of every call to this OTLP collector, such as http://127.0.0.1:4317"),
    ):
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=defaults[name], metavar=kind.__name__.upper(), help=text)
    group.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="how a line of the log is written")
    group.add_argument(
        "--client-role",
        dest="client_roles",
        action="append",
        default=[],
        type=_pair,
        metavar="CN=ROLE",
        help="what a client certificate of this common name may do: rollout or control; may be repeated",
    )
    group.add_argument(
        "--token-file",
        dest="token_files",
        action="append",
        default=[],
        type=_role_and_path,
        metavar="ROLE=PATH",
        help="ask callers for a bearer token; that in the file gives the role rollout or control; may be repeated",
    )
    group.add_argument(
        "--delta", action="store_true", help="keep a copy of the committed weights in memory and take changes over it"
    )


def options_from(args: argparse.Namespace, **more: object) -> ServerOptions:
    """ServerOptions from parsed flags; `more` fills what the command itself knows (world_size, server_build)."""
    given = {f.name: getattr(args, f.name) for f in fields(ServerOptions) if hasattr(args, f.name)}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return ServerOptions(**(given | more))


def _pair(text: str) -> tuple[str, str]:
    left, equals, right = text.rpartition("=")
    if not (equals and left and right):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form CN=ROLE")
    return left, right


def _role_and_path(text: str) -> tuple[str, Path]:
    role, equals, path = text.partition("=")
    if not (equals and role and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ROLE=PATH")
    return role, Path(path)
