"""What stands around every call of a server: who is let in, within which bounds, and who watches."""

from __future__ import annotations

import asyncio

import grpc.aio

from skyrl_rollout.server.auth import AuthorizeEachCall, Credentialed
from skyrl_rollout.server.certificates import ServerCertificates
from skyrl_rollout.server.limits import BoundEachCall
from skyrl_rollout.server.logs import IdentifyEachCall
from skyrl_rollout.server.metrics import Metrics
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.parts import ServerParts
from skyrl_rollout.server.tracing import Tracing, is_wanted, need_installed
from skyrl_rollout.server.undecodable import RefuseUndecodable


def check_files(options: ServerOptions) -> None:
    """Raises ValueError for a token or TLS file that cannot be used, and for traces without the extra `otel`."""
    ServerCertificates.of(options)
    Credentialed(options)
    need_installed(options.otel_endpoint)


class Perimeter:
    """Made once the engine is there. certificates: None in clear. metrics, tracing: None where nobody asked."""

    def __init__(self, parts: ServerParts) -> None:
        """Raises what `check_files` raises."""
        self._options = options = parts.options
        self.certificates = ServerCertificates.of(options)
        self._credentialed = Credentialed(options)
        self._metrics = Metrics(parts) if options.metrics_listen is not None else None
        self._tracing: Tracing | None = None
        if is_wanted(options.otel_endpoint):
            self._tracing = Tracing(options.otel_endpoint, instance_id=parts.state.instance_id)

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """The first is the outermost."""
        around: list[grpc.aio.ServerInterceptor] = []
        if self._tracing is not None:
            around += self._tracing.interceptors
        if self._metrics is not None:
            around.append(self._metrics.count_calls())
        around += [RefuseUndecodable(), IdentifyEachCall()]
        if not self._credentialed.is_open:
            around.append(AuthorizeEachCall(self._credentialed))
        return [*around, BoundEachCall()]

    def open(self) -> str:
        """Serves the metrics; what the ready line says about them. Raises OSError where the port is taken."""
        if self._metrics is None:
            return ""
        return f" metrics={self._metrics.open(self._options, self.certificates, self._credentialed)}"

    async def close(self) -> None:
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if self._tracing is not None:
            await self._tracing.close()
