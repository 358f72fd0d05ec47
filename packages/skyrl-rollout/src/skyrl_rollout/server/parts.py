"""What one server is made of: the engine and everything that is kept about it, shared by the three services."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_rollout.server.adapters import AdapterShelf
from skyrl_rollout.server.committing import Updater
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.guard import Guard
from skyrl_rollout.server.memory import EngineMemory
from skyrl_rollout.server.operations import OperationBook
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.pausing import Pauser
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.state import ServerState
from skyrl_rollout.server.swapping import Swapper


@dataclass(frozen=True)
class ServerParts:
    """One of each, wired together by `assemble`."""

    engine: Engine
    options: ServerOptions
    state: ServerState
    runs: RunRegistry
    pauser: Pauser
    updater: Updater
    memory: EngineMemory
    operations: OperationBook
    guard: Guard


def assemble(engine: Engine, options: ServerOptions) -> ServerParts:
    """The parts of a server that serves version 0 of `engine`."""
    state, operations = ServerState(), OperationBook()
    runs = RunRegistry(engine, state, options)
    pauser = Pauser(engine, state, runs)
    adapters = AdapterShelf(engine, state, runs, limit=options.max_adapters)
    updater = Updater(engine, state, runs, pauser, Swapper(engine, state, adapters, options), options)
    memory = EngineMemory(engine, state, runs, pauser, adapters)
    guard = Guard(operations, pauser, updater)
    return ServerParts(engine, options, state, runs, pauser, updater, memory, operations, guard)
