"""How a handler's exception becomes the status of the call, so that every refusal carries its reason."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc.aio
from grpc_status import rpc_status

from skyrl_rollout.errors import InvalidRequest, RolloutError, to_status

logger = logging.getLogger(__name__)
Handler = Callable[[Any, Any, grpc.aio.ServicerContext], Awaitable[Any]]


def answered(handler: Handler) -> Handler:
    """Wraps a handler: RolloutError is sent as it is, ValueError as INVALID_ARGUMENT, anything else as INTERNAL with a
    traceback in the log."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await handler(self, request, context)
        except RolloutError as error:
            refusal = error
        except ValueError as error:
            refusal = InvalidRequest(str(error))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            logger.exception("%s failed", handler.__name__)
            refusal = RolloutError(f"{handler.__name__} failed in the server: {type(error).__name__}: {error}")
        return await refuse(context, refusal)

    return wrapped


async def refuse(context: grpc.aio.ServicerContext, error: RolloutError) -> NoReturn:
    """Ends the call with the error's status."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status raises")
