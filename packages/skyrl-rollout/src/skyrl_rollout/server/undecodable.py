"""Bytes that are no message of their type: refused like any other bad input, where gRPC itself would answer UNKNOWN."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.server.answers import refuse
from skyrl_rollout.server.interception import behaviour_of, with_behaviour

PACKAGE = "/skyrl_rollout."


class _Undecodable:
    """What stands in for a message that could not be read, until its call is refused."""

    def __init__(self, error: DecodeError) -> None:
        self.error = error


class RefuseUndecodable(grpc.aio.ServerInterceptor):
    """Around the calls of this protocol. Within it every request is a message."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(PACKAGE):
            return handler
        behaviour = behaviour_of(handler)

        async def one(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if isinstance(request, _Undecodable):
                await refuse(context, _refusal(details.method, request.error))
            return await behaviour(request, context)

        async def streamed(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            async def read() -> AsyncIterator[Any]:
                async for request in requests:
                    if isinstance(request, _Undecodable):
                        raise _refusal(details.method, request.error)
                    yield request

            return await behaviour(read(), context)

        return with_behaviour(
            handler,
            streamed if handler.request_streaming else one,
            request_deserializer=_tolerant(handler.request_deserializer),
        )


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Undecodable(error)

    return read


def _refusal(method: str, error: DecodeError) -> InvalidRequest:
    return InvalidRequest(
        f"the bytes sent to {method} are no message of its type ({error}): generate the stubs from this server's protos"
    )
