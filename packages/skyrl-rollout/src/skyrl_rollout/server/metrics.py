"""What a monitor may read about a server: OpenMetrics on a port of its own, from a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from skyrl_rollout.errors import Unauthenticated
from skyrl_rollout.server.auth import Credentialed
from skyrl_rollout.server.certificates import ServerCertificates
from skyrl_rollout.server.interception import AroundEachCall
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.parts import ServerParts
from skyrl_rollout.server.state import EngineState
from skyrl_rollout.server.updates import Update, UpdateState

logger = logging.getLogger(__name__)

SCRAPE_S = 5.0  # an event loop that does not answer for so long makes the scrape fail, which is what a monitor must see
STALL_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Described:
    """One metric as the table of docs/metrics.md shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


METRICS = {
    m.name: m
    for m in (
        Described("skyrl_rollout_requests", "counter", ("method", "code"), "Calls that ended, by gRPC status code."),
        Described("skyrl_rollout_tokens_generated", "counter", (), "Tokens made."),
        Described("skyrl_rollout_generations", "gauge", ("state",), "Generate requests that run, wait or are frozen."),
        Described("skyrl_rollout_kv_usage_ratio", "gauge", (), "Share of the KV cache in use, 0 to 1."),
        Described("skyrl_rollout_engine_steps", "counter", (), "Steps of the engine."),
        Described("skyrl_rollout_weight_version", "gauge", ("policy",), "Version that serves; the base policy is ''."),
        Described("skyrl_rollout_state", "gauge", ("state",), "1 for the state that the server is in, else 0."),
        Described("skyrl_rollout_updates", "counter", ("transport", "kind", "state"), "Updates that came to a state."),
        Described("skyrl_rollout_update_bytes", "counter", ("transport",), "Bytes of sealed updates."),
        Described("skyrl_rollout_commit_stall_seconds", "histogram", (), "How long a commit stopped the tokens."),
        Described("skyrl_rollout_server", "info", ("instance_id", "build", "model"), "Who answers, always 1."),
    )
}


class Metrics:
    """The metrics of one server. `open` serves them; `count_calls` is the interceptor that counts."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._server: WSGIServer | None = None
        self.registry = CollectorRegistry()
        self._requests = Counter(*_described("requests"), registry=self.registry)
        self._updates = Counter(*_described("updates"), registry=self.registry)
        self._update_bytes = Counter(*_described("update_bytes"), registry=self.registry)
        self._stalls = Histogram(*_described("commit_stall_seconds"), registry=self.registry, buckets=STALL_BUCKETS_S)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        parts.updater.book.on_move = self._count_update

    def count_calls(self) -> AroundEachCall:
        """The outermost interceptor, so that refused calls count."""
        return _CountEachCall(lambda method, code: self._requests.labels(method, code).inc())

    def open(self, options: ServerOptions, certificates: ServerCertificates | None, credentialed: Credentialed) -> str:
        """Serves on `metrics_listen` and returns the url: in clear on a loopback address, else over TLS, and for those
        who show a token where the server asks for one. Raises OSError where the port is taken."""
        host, port = options.metrics_host_port
        local = options.metrics_are_local
        app = make_wsgi_app(self.registry)
        self._server = make_server(
            host,
            port,
            app if local else _for_known_callers(app, credentialed),
            _secured(host, None if local else certificates),
            _QuietHandler,
        )
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if local else 'https'}://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry from the thread of a scrape."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_S)

    async def _read(self) -> list[Metric]:
        """On the event loop, where nothing changes meanwhile."""
        parts, state, runs = self._parts, self._parts.state, self._parts.runs
        load, frozen = parts.engine.load(), runs.frozen
        generations = _gauge("generations")
        for name, count in (("running", runs.running - frozen), ("waiting", runs.waiting), ("frozen", frozen)):
            generations.add_metric([name], count)
        versions = _gauge("weight_version")
        for policy, version in state.versions.items():
            versions.add_metric([policy], version)
        states = _gauge("state")
        for known in EngineState:
            states.add_metric([known.name.lower()], known is state.state)
        info = InfoMetricFamily(*_described("server")[:2])
        identity = {"instance_id": state.instance_id, "build": parts.options.server_build}
        info.add_metric([], identity | {"model": parts.engine.identity.name})
        return [
            CounterMetricFamily(*_described("tokens_generated")[:2], value=runs.tokens_generated),
            CounterMetricFamily(*_described("engine_steps")[:2], value=load.step_counter),
            GaugeMetricFamily(*_described("kv_usage_ratio")[:2], value=load.kv_usage),
            generations,
            versions,
            states,
            info,
        ]

    def _count_update(self, update: Update) -> None:
        self._updates.labels(update.transport, update.manifest.kind, update.state.name.lower()).inc()
        if update.state is UpdateState.SEALED:
            self._update_bytes.labels(update.transport).inc(sum(update.manifest.shard_nbytes().values()))
        elif update.state is UpdateState.COMMITTED and update.report is not None:
            self._stalls.observe(update.report.stall_s)


def _described(name: str) -> tuple[str, str, tuple[str, ...]]:
    m = METRICS[f"skyrl_rollout_{name}"]
    return m.name, m.text, m.labels if m.kind != "info" else ()


def _gauge(name: str) -> GaugeMetricFamily:
    full_name, text, labels = _described(name)
    return GaugeMetricFamily(full_name, text, labels=labels)


def table() -> str:
    """The table of docs/metrics.md."""
    rows = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for m in METRICS.values():
        name = m.name + {"counter": "_total", "info": "_info"}.get(m.kind, "")
        rows.append(f"| `{name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.text} |")
    return "\n".join(rows) + "\n"


class _CountEachCall(AroundEachCall):
    def __init__(self, count: Callable[[str, str], None]) -> None:
        self._count = count

    @asynccontextmanager
    async def around(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        code = grpc.StatusCode.UNKNOWN
        try:
            yield
            code = context.code() or grpc.StatusCode.OK
        except asyncio.CancelledError:
            left_s = context.time_remaining()
            is_late = left_s is not None and left_s <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            code = context.code() or code
            raise
        finally:
            self._count(method.rpartition(".")[2], code.name)


class _QuietHandler(WSGIRequestHandler):
    timeout = 10.0  # a caller that says nothing does not keep its thread

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


def _secured(host: str, certificates: ServerCertificates | None) -> type[WSGIServer]:
    class Server(ThreadingMixIn, WSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def get_request(self) -> tuple[Any, Any]:
            connection, address = super().get_request()
            if certificates is not None:  # the files as they are now; the handshake is for the thread of the connection
                context = certificates.context()
                connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            return connection, address

        def handle_error(self, request: Any, client_address: Any) -> None:
            logger.debug("a scrape from %s failed", client_address, exc_info=True)

    return Server


def _for_known_callers(app: Any, credentialed: Credentialed) -> Any:
    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        header = environ.get("HTTP_AUTHORIZATION")
        try:
            if credentialed.has_tokens and credentialed.role_of_token([header] if header else []) is None:
                raise Unauthenticated("send `Authorization: Bearer TOKEN`")
        except Unauthenticated as error:
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return iter([error.message.encode()])
        answer: Iterator[bytes] = app(environ, start_response)
        return answer

    return checked
