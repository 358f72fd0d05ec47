"""How the ranks of a policy are called: in this process, or elsewhere behind the same two methods."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from skyrl.train.backends import BackendPlugin
from skyrl.train.policy.contract import Role
from skyrl.train.policy.critic_worker import WORKERS
from skyrl.train.policy.process_group import join_alone, leave_alone, worker_environ


class Workers(Protocol):
    """All ranks of one role."""

    world_size: int

    def run(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls `method` in every rank, rank r with arguments[r]; results by rank. The first error is raised."""
        ...

    def close(self) -> None: ...


class LocalWorkers:
    """One worker in this process: nothing to start, nothing to copy."""

    world_size = 1

    def __init__(self, cfg: Any, plugin: BackendPlugin, role: Role, *, total_steps: int) -> None:
        os.environ.update(worker_environ(cfg, plugin, os.environ))
        place = join_alone(cfg)
        try:
            self._worker = WORKERS[role](cfg, plugin.policy_factory, place, role, total_steps=total_steps)
        except BaseException:
            leave_alone()
            raise

    def run(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self._worker, method)(*arguments[0])]

    def close(self) -> None:
        self._worker.close()
        leave_alone()
