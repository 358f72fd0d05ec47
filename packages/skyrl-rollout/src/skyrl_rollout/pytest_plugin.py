"""The suite as tests of any project: `pytest --rollout-url grpc://host:port --pyargs skyrl_rollout.conformance`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from skyrl_rollout.conformance.target import Target

T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flags of `skyrl-rollout conformance`, under names of their own."""
    group = parser.getgroup("rollout", "conformance of a rollout server")
    group.addoption("--rollout-url", help="grpc://host:port of the server to test")
    group.addoption("--rollout-launcher", help="command that starts one: {listen} and {model} are filled in")
    group.addoption("--rollout-model", type=Path, help="the folder of the model that is served")
    group.addoption("--rollout-token-file", type=Path, help="file with the bearer token of a trainer")


class RunningSuite:
    """One connected target and the event loop that it belongs to."""

    def __init__(self, runner: asyncio.Runner, target: Target) -> None:
        self._runner, self.target = runner, target

    def run(self, work: Callable[[Target], Awaitable[T]]) -> T:
        """Runs `work` on the target and returns what it returns."""

        async def on_loop() -> T:
            return await work(self.target)

        return self._runner.run(on_loop())


@pytest.fixture(scope="session")
def rollout_suite(pytestconfig: pytest.Config) -> Iterator[RunningSuite]:
    """The server that the flags name, connected for the whole session; tests are skipped without one."""
    # imported where it is used: this plugin is loaded by every pytest run of an environment that has the package
    from skyrl_rollout.conformance.launching import Launcher
    from skyrl_rollout.conformance.suite import Plan, connected
    from skyrl_rollout.security import ANONYMOUS, Credentials

    option = pytestconfig.getoption
    url, command, model, token = (
        option(name) for name in ("rollout_url", "rollout_launcher", "rollout_model", "rollout_token_file")
    )
    if url is None and command is None:
        pytest.skip("no server to test: give --rollout-url grpc://host:port")
    launcher = None if command is None else Launcher(command, model=model)
    credentials = ANONYMOUS if token is None else Credentials.from_files(token=token)
    with asyncio.Runner() as runner:
        context = connected(Plan(url, launcher, model, credentials))
        target = runner.run(context.__aenter__())
        try:
            yield RunningSuite(runner, target)
        finally:
            runner.run(context.__aexit__(None, None, None))
