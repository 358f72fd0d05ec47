"""From a server's address to how each item ended: which run, in which order, and on which server."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from skyrl_rollout.conformance.copied_model import FAR_FROM_DEFAULT, copied_model
from skyrl_rollout.conformance.item import (
    FAILED,
    NOT_OFFERED,
    NOT_RUN,
    PASSED,
    Failed,
    Item,
    NotOffered,
    NotRun,
    Outcome,
)  # fmt: skip
from skyrl_rollout.conformance.launching import LaunchedServer, Launcher
from skyrl_rollout.conformance.stubs import Stubs
from skyrl_rollout.conformance.table import ITEMS
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.errors import from_rpc_error
from skyrl_rollout.security import ANONYMOUS, Credentials

# Of a server that the suite launches: quick to end, and with limits that a check can reach.
SETTINGS: Mapping[str, object] = {
    "drain_grace_s": 1.0, "max_concurrent": 1024, "max_chunk_bytes": 128 << 10, "max_message_bytes": 256 << 10,
}  # fmt: skip
CONNECT_S = 10.0


@dataclass(frozen=True)
class Plan:
    """What is to be tested. url: None launches the server too. rollout_token: one that may only generate."""

    url: str | None = None
    launcher: Launcher | None = None
    model: Path | None = None
    credentials: Credentials = ANONYMOUS
    rollout_token: str | None = None
    full_length: bool = False


@asynccontextmanager
async def connected(plan: Plan) -> AsyncIterator[Target]:
    """The server of the plan, launched if need be. Raises ValueError, AioRpcError or Failed where none answers."""
    if plan.url is not None:
        async with _connected(plan, plan.url, plan.credentials, plan.rollout_token) as target:
            yield target
        return
    if plan.launcher is None:
        raise ValueError("there is nothing to test: give the url of a server, or --launcher to start one")
    with tempfile.TemporaryDirectory(prefix="skyrl-conformance-") as folder, _odd_model(plan.model) as model:
        tokens = {role: secrets.token_hex(16) for role in ("control", "rollout")}
        settings = {name: value for name, value in SETTINGS.items() if plan.launcher.sets(name)}
        secured = plan.launcher.sets("token_file")
        if secured:
            settings["token_file"] = [f"{role}={_written(folder, role, token)}" for role, token in tokens.items()]
        credentials = Credentials(tokens["control"]) if secured else plan.credentials
        async with LaunchedServer(plan.launcher, settings, credentials=credentials, model=model) as server:
            rollout_token = tokens["rollout"] if secured else plan.rollout_token
            served = replace(plan, model=model)
            async with _connected(served, server.url, credentials, rollout_token, server) as target:
                target.shared |= settings
                yield target


def _odd_model(model: Path | None) -> AbstractContextManager[Path | None]:
    """What a launched server serves: the model, with sampling defaults in its files that no request may meet."""
    return nullcontext() if model is None else copied_model(model, generation_config=FAR_FROM_DEFAULT)


@asynccontextmanager
async def _connected(
    plan: Plan, url: str, credentials: Credentials, rollout_token: str | None, server: LaunchedServer | None = None
) -> AsyncIterator[Target]:
    async with Stubs(url, credentials) as stubs:
        target = Target(
            url, stubs, await stubs.info(CONNECT_S), credentials=credentials, rollout_token=rollout_token,
            launcher=plan.launcher, server=server, model=plan.model, full_length=plan.full_length,
        )  # fmt: skip
        try:
            yield target
        finally:
            victim: LaunchedServer | None = target.shared.get("victim")
            if victim is not None:
                await victim.stop()


async def run(
    target: Target, items: Iterable[Item] = ITEMS, *, tell: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Every item's outcome, by number. Those that need the server for themselves run one after another, the others
    beside them, and those that kill it at the end. tell: called with each outcome when it is known."""
    items, outcomes = list(items), []

    async def one(item: Item) -> None:
        outcomes.append(await check(target, item))
        tell(outcomes[-1])

    beside = [asyncio.create_task(one(item)) for item in items if item.when == "beside"]
    try:
        for item in items:
            if item.when == "alone":
                await one(item)
        await asyncio.gather(*beside)
    finally:
        for task in beside:
            task.cancel()
    for item in items:
        if item.when == "end":
            await one(item)
    return sorted(outcomes, key=lambda o: o.item.number)


async def check(target: Target, item: Item) -> Outcome:
    """Runs one item and leaves the server at rest."""
    began = time.monotonic()
    status, reason = await _checked(target, item)
    if item.when == "alone" and status in (PASSED, FAILED):
        try:
            await target.settle()
        except (Failed, grpc.aio.AioRpcError) as error:
            if status == PASSED:
                status, reason = FAILED, f"afterwards: {_said(error)}"
    return Outcome(item, status, reason, time.monotonic() - began)


async def _checked(target: Target, item: Item) -> tuple[str, str]:
    if "launcher" in item.needs and target.launcher is None and item.capability is None:
        return NOT_RUN, "launcher"
    try:
        async with asyncio.timeout(item.timeout_s):
            return PASSED, await item.check(target) or ""
    except NotOffered as error:
        return NOT_OFFERED, str(error)
    except NotRun as error:
        return NOT_RUN, str(error)
    except TimeoutError:
        return FAILED, f"the check did not end within {item.timeout_s:g} s"
    except (Failed, grpc.aio.AioRpcError) as error:
        return FAILED, _said(error)
    except Exception as error:
        return FAILED, f"the check broke: {type(error).__name__}: {error}"


def _said(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    typed = from_rpc_error(error)
    return f"a call that had to succeed ended with {typed.code.name}: {typed.message}"


def _written(folder: str, role: str, token: str) -> Path:
    path = Path(folder) / role
    path.touch(mode=0o600)
    path.write_text(token)
    return path
