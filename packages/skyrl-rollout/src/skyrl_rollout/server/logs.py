"""What a line of the log looks like, and which request or update it belongs to."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc.aio

from skyrl_rollout.server.interception import AroundEachCall

logger = logging.getLogger(__name__)

MAX_SHOWN = 200  # characters of an id, which a caller chose
IDS = ("request_id", "update_id")

# Set for the handler of a call, and so for the tasks and timers that it starts.
CURRENT: ContextVar[dict[str, str] | None] = ContextVar("current call", default=None)


class IdentifyEachCall(AroundEachCall):
    """From the call on, lines carry the method and the request or update that it names. Messages never reach a log:
    they hold tokens."""

    @asynccontextmanager
    async def around(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        began = time.monotonic()
        mark = CURRENT.set({"method": method.rpartition(".")[2]} | _ids_of(request))
        try:
            yield
        finally:
            if (code := context.code()) is not None:  # an answer sets none
                logger.info("refused with %s after %.3f s", code.name, time.monotonic() - began)
            _reset(mark)

    def received(self, message: Any) -> None:
        current = CURRENT.get()
        if current is not None and "update_id" not in current:
            current.update(_ids_of(message))


def _reset(mark: Any) -> None:
    try:
        CURRENT.reset(mark)
    except ValueError:
        CURRENT.set(None)  # a stream that its caller left is closed in another context


def _ids_of(message: Any) -> dict[str, str]:
    return {name: value[:MAX_SHOWN] for name in IDS if (value := getattr(message, name, ""))}


class TextLines(logging.Formatter):
    """`time LEVEL logger message request_id=...`; a line break in a message is escaped: a caller may have sent it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = "".join(f" {name}={_one_word(value)}" for name, value in (CURRENT.get() or {}).items())
        return super().formatMessage(record).replace("\n", "\\n") + ids


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, exception, and method, request_id, update_id if known."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= CURRENT.get() or {}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


FORMATS: dict[str, Callable[[], logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def set_format(name: str) -> None:
    """Every handler of the root logger writes lines of this format from now on; one is made where there is none."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler())
        root.setLevel(logging.INFO)
    for handler in root.handlers:
        handler.setFormatter(FORMATS[name]())


def _one_word(text: str) -> str:
    return text if text.isprintable() and " " not in text else json.dumps(text)
