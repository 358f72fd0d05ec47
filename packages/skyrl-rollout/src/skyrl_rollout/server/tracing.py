"""Traces of every call, through OpenTelemetry's own gRPC instrumentation, where the extra `otel` is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from skyrl_rollout.server.interception import AroundEachCall

logger = logging.getLogger(__name__)

INSTALL = "pip install 'skyrl-rollout[otel]'"
VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PARTS = ("opentelemetry.sdk", "opentelemetry.instrumentation.grpc", "opentelemetry.exporter.otlp.proto.grpc")
SERVICE = "skyrl-rollout"


class Tracing:
    """Made after the engine, since an engine may fork and the exporter has a connection. `interceptors` go outside
    every other one."""

    def __init__(self, endpoint: str | None, *, instance_id: str) -> None:
        """Raises ValueError where the extra is missing."""
        need_installed(endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.grpc import aio_server_interceptor
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE)})
        resource = resource.merge(Resource({"service.instance.id": instance_id}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self.interceptors: list[grpc.aio.ServerInterceptor] = [
            aio_server_interceptor(tracer_provider=self._provider),
            StreamsAsGenerators(),
            TellHowItEnded(),
        ]

    async def close(self) -> None:
        """Sends what is left; a collector that does not answer costs at most the exporter's own timeout."""
        await asyncio.to_thread(self._provider.shutdown)


def is_wanted(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """With the flag always; with one of the standard variables where the extra is installed."""
    if endpoint is not None:
        return True
    return any(environment.get(name) for name in VARIABLES) and _is_installed()


def need_installed(endpoint: str | None) -> None:
    """Raises ValueError with the command that installs what is missing."""
    if endpoint is not None and not _is_installed():
        raise ValueError(f"--otel-endpoint {endpoint} needs OpenTelemetry, which is not installed: {INSTALL}")


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in PARTS)
    except ImportError:
        return False


class TellHowItEnded(AroundEachCall):
    """The instrumentation hears of `abort` and `set_code`; ours refuse with `abort_with_status`."""

    @asynccontextmanager
    async def around(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if (code := context.code()) is not None:  # an answer sets none
                context.set_code(code)


class StreamsAsGenerators(grpc.aio.ServerInterceptor):
    """The instrumentation iterates over what a handler yields; ours write to their context. One message is on its way
    at a time, so that a slow reader holds the handler up as before."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not handler.response_streaming or handler.request_streaming:
            return handler
        behaviour = handler.unary_stream
        if inspect.isasyncgenfunction(behaviour):
            return handler

        def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            return _written(behaviour, request, context)

        return grpc.unary_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


class _HandingContext:
    """A context whose `write` hands the message to the reader of the generator."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self.written: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await self.written.put(message)
        await self.written.join()


async def _written(
    behaviour: Callable[[Any, Any], Any], request: Any, context: grpc.aio.ServicerContext
) -> AsyncIterator[Any]:
    handing = _HandingContext(context)
    handler = asyncio.ensure_future(behaviour(request, handing))
    message: asyncio.Future[Any] | None = None
    try:
        while True:
            message = asyncio.ensure_future(handing.written.get())
            await asyncio.wait((handler, message), return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                message.cancel()
                await handler  # raises what the handler raised
                return
            yield message.result()
            handing.written.task_done()
    finally:
        if message is not None:
            message.cancel()
        if not handler.done():
            handler.cancel()
            await asyncio.wait((handler,))
