"""One step around every call, whatever its shape: who may make it, what it is counted and logged as."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio

Behaviour = Callable[[Any, Any], Any]


class AroundEachCall(grpc.aio.ServerInterceptor):
    """A subclass says with `around` what happens before and after a call. Messages of a stream do not pass here."""

    def around(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AbstractAsyncContextManager[None]:
        """method: "/package.Service/Name". request: the message, None where the caller streams. Leaving by `refuse` of
        `answers` ends the call before its handler is reached."""
        raise NotImplementedError

    def received(self, message: Any) -> None:
        """Called for each message of a caller that streams."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # no such method: gRPC answers UNIMPLEMENTED
        behaviour = behaviour_of(handler)
        wrap = self._around_stream if inspect.isasyncgenfunction(behaviour) else self._around_reply
        return with_behaviour(handler, wrap(details.method, behaviour, takes_stream=handler.request_streaming))

    def _around_reply(self, method: str, behaviour: Behaviour, *, takes_stream: bool) -> Behaviour:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self.around(method, None if takes_stream else request, context):
                return await behaviour(self._watched(request) if takes_stream else request, context)

        return call

    def _around_stream(self, method: str, behaviour: Behaviour, *, takes_stream: bool) -> Behaviour:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self.around(method, None if takes_stream else request, context):
                async for response in behaviour(self._watched(request) if takes_stream else request, context):
                    yield response

        return call

    async def _watched(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in requests:
            self.received(message)
            yield message


_SHAPES = {False: "unary", True: "stream"}


def _kind(handler: grpc.RpcMethodHandler) -> str:
    return f"{_SHAPES[handler.request_streaming]}_{_SHAPES[handler.response_streaming]}"


def behaviour_of(handler: grpc.RpcMethodHandler) -> Behaviour:
    """The coroutine or generator function that answers."""
    behaviour: Behaviour = getattr(handler, _kind(handler))
    return behaviour


def with_behaviour(
    handler: grpc.RpcMethodHandler, behaviour: Behaviour, *, request_deserializer: Callable[[bytes], Any] | None = None
) -> grpc.RpcMethodHandler:
    """The same handler with another function, and maybe another way to read requests."""
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
    return make(behaviour, request_deserializer or handler.request_deserializer, handler.response_serializer)
