"""The ranks of a policy as Ray actors: where they are placed, what they are started with, and what their death says."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import psutil
import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from skyrl_rollout.errors import RolloutError
from skyrl_rollout.weights.shm import remove_stale

from skyrl.train import plugins
from skyrl.train.algorithms import tables
from skyrl.train.backends import BackendPlugin
from skyrl.train.failures import RunFailed
from skyrl.train.policy.contract import Role
from skyrl.train.policy.critic_worker import WORKERS
from skyrl.train.policy.process_group import join_others, resolve_device, worker_environ
from skyrl.train.policy.roles import num_workers, roles_of, roles_that_share

UV_ENVIRONMENTS = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 3600.0
DEATH_NOTICE_S = 10.0
STOP_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
LAST_LOG_LINES = 20

_joined_here = False
"""Whether `start_ray`, and not the caller, connected this process."""


class WorkerDied(RunFailed):
    """A worker process is gone. The message names its rank, node and process, and shows its last lines."""


class RankProcess:
    """What runs in the actor: one worker of its role, built once the process group stands."""

    def whereabouts(self) -> dict[str, Any]:
        """Node address, process id, a free port, and the files that hold this process's output."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        outputs = [os.readlink(f"/proc/self/fd/{stream}") for stream in (1, 2)]
        return {"address": ray.util.get_node_ip_address(), "pid": os.getpid(), "port": port, "outputs": outputs}

    def import_plugins(self, folder: str, modules: Sequence[str]) -> None:
        """The user's modules, from where the driver has them: before `build`, whose functions may lie in them."""
        if folder not in sys.path:
            sys.path.append(folder)
        plugins.import_plugins(modules)

    def build(self, cfg: Any, factory: str, role: Role, total_steps: int, rank: dict[str, Any], added: Any) -> None:
        tables.install(added)
        place = join_others(**rank)
        self._worker = WORKERS[role](cfg, factory, place, role, total_steps=total_steps)

    def run(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._worker, method)(*arguments)


class RayWorkers:
    """`nodes` x `per_node` ranks, `per_node` of them on each machine. See `policy.workers.Workers`."""

    def __init__(
        self, cfg: Any, plugin: BackendPlugin, role: Role, *, nodes: int, per_node: int, total_steps: int
    ) -> None:
        self.world_size, self._role = nodes * per_node, role
        device = resolve_device(cfg)
        start_ray(cfg)
        self._placement = _Placement.take(cfg, role, nodes=nodes, per_node=per_node, device=device)
        environ = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        environ |= worker_environ(cfg, plugin, os.environ)
        self._actors = [self._placement.actor(rank, environ, self.world_size) for rank in range(self.world_size)]
        self._where: list[dict[str, Any]] = []
        self._broken = True  # until all ranks stand, and after a rank failed: the others may be waiting for it
        try:
            self._where = self._gather([a.whereabouts.remote() for a in self._actors], "start", START_TIMEOUT_S)
            if modules := cfg.environment.plugins:
                importing = [a.import_plugins.remote(os.getcwd(), modules) for a in self._actors]
                self._gather(importing, "import environment.plugins", START_TIMEOUT_S)
            self._gather(self._build(cfg, plugin, device, total_steps), "load the model", START_TIMEOUT_S)
            self._broken = False
        except BaseException:
            self.close()
            raise

    def run(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [actor.run.remote(method, args) for actor, args in zip(self._actors, arguments, strict=True)]
        try:
            return self._gather(calls, method, CALL_TIMEOUT_S)
        except BaseException:
            self._broken = True
            raise

    def close(self) -> None:
        if not self._broken:
            closing = [actor.run.remote("close", ()) for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=STOP_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor)
        self._placement.give_back()
        here = ray.util.get_node_ip_address()
        free_weights_of([where["pid"] for where in self._where if where["address"] == here])

    def _build(self, cfg: Any, plugin: BackendPlugin, device: str, total_steps: int) -> list[Any]:
        first = self._where[0]
        init_method = f"tcp://{first['address']}:{first['port']}"
        added = tables.added_functions()
        calls = []
        for r, actor in enumerate(self._actors):
            rank = {"device_type": device, "rank": r, "world_size": self.world_size, "init_method": init_method}
            calls.append(actor.build.remote(cfg, plugin.policy_factory, self._role, total_steps, rank, added))
        return calls

    def _gather(self, calls: list[Any], what: str, timeout_s: float) -> list[Any]:
        """Results by rank. The first rank that fails is reported at once: the others may wait for it for ever."""
        deadline = time.monotonic() + timeout_s
        pending, rank_of = list(calls), {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                waiting = sorted(rank_of[call] for call in pending)
                raise TimeoutError(f"{self._role} ranks {waiting} did not {what} within {timeout_s:.0f} s")
            rank = rank_of[done[0]]
            try:
                results[rank] = self._result(done[0], rank, what)
            except RuntimeError as error:
                if not isinstance(error, WorkerDied):
                    self._raise_death_behind(pending, rank_of, what)
                raise
        return [results[rank] for rank in range(len(calls))]

    def _raise_death_behind(self, pending: list[Any], rank_of: dict[Any, int], what: str) -> None:
        """Raises WorkerDied for a rank whose death broke a collective: ranks beside it may notice before Ray does."""
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=DEATH_NOTICE_S) if pending else ([], [])
        for call in done:
            try:
                self._result(call, rank_of[call], what)
            except WorkerDied:
                raise
            except RuntimeError:
                continue

    def _result(self, call: Any, rank: int, what: str) -> Any:
        try:
            return ray.get(call, timeout=STOP_TIMEOUT_S)
        except RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            # what the user did wrong speaks for itself; of anything else the worker's own traceback is shown
            shown = None if isinstance(error.cause, ValueError | RolloutError) else error
            raise error.cause from shown
        except (RayActorError, GetTimeoutError) as error:
            where = self._where[rank] if rank < len(self._where) else {}
            raise WorkerDied(
                f"{self._role} rank {rank} of {self.world_size} (pid {where.get('pid', '?')} on "
                f"{where.get('address', 'a node that never answered')}) died while asked to {what}: {error}\n"
                f"{last_lines(where.get('outputs', []))}"
            ) from error


class _Placement:
    """The bundles that ranks run in. Roles that share their devices share them."""

    _shared: dict[tuple[int, int], _Placement] = {}
    open = 0

    def __init__(self, nodes: int, per_node: int, device: str, roles: int) -> None:
        self._per_node, self._users = per_node, 0
        self._share = 1.0 / roles
        self._gpu = device == "cuda"
        bundle = {"CPU": float(per_node * roles)} | ({"GPU": float(per_node)} if self._gpu else {})
        self.group: PlacementGroup = placement_group([bundle] * nodes, strategy="PACK")
        if not self.group.wait(START_TIMEOUT_S):
            remove_placement_group(self.group)
            raise ValueError(
                f"no {nodes} machine(s) with {bundle} free became available within {START_TIMEOUT_S:.0f} s: lower "
                f"trainer.placement.*_num_gpus_per_node, or add machines"
            )

    @classmethod
    def take(cls, cfg: Any, role: Role, *, nodes: int, per_node: int, device: str) -> _Placement:
        shape, sharing = (nodes, per_node), roles_that_share(cfg)
        if role not in sharing:
            placement = cls(nodes, per_node, device, roles=1)
        else:
            placement = cls._shared.get(shape) or cls(nodes, per_node, device, roles=len(sharing))
            cls._shared[shape] = placement
        placement._users += 1
        cls.open += 1
        return placement

    def actor(self, rank: int, environ: dict[str, str], world_size: int) -> Any:
        local_rank = rank % self._per_node
        names = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0" if self._gpu else str(local_rank)}
        return (
            ray.remote(RankProcess)
            .options(
                num_cpus=1,
                num_gpus=self._share if self._gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=rank // self._per_node
                ),
                runtime_env={"env_vars": environ | names},
            )
            .remote()
        )

    def give_back(self) -> None:
        self._users -= 1
        _Placement.open -= 1
        if self._users == 0:
            for shape in [s for s, p in self._shared.items() if p is self]:
                del self._shared[shape]
            remove_placement_group(self.group)


def start_ray(cfg: Any) -> None:
    """Joins the cluster that $RAY_ADDRESS names, else starts Ray on this machine; `leave_ray` undoes it.

    On this machine Ray's processes end with the thread that started them, and with them, a minute later, this process:
    a thread that may end before the process calls `leave_ray` first.
    """
    global _joined_here
    ranks = sum(num_workers(cfg, role) for role in roles_of(cfg))
    if ray.is_initialized():
        if not _too_small(ranks):
            return
        leave_ray()
    _joined_here = True
    if UV_ENVIRONMENTS not in os.environ:
        # Under `uv run` Ray would make an environment anew for every job and start each worker through `uv run`. The
        # variable itself is read when ray is imported, which a user's module may have done before ours.
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    quiet: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False, "configure_logging": False}
    if address := os.environ.get("RAY_ADDRESS"):
        require_answer(address)
        ray.init(log_to_driver=False)
        return
    # ranks without a GPU share cores when there are fewer cores than ranks
    try:
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, ranks), **quiet)
    except Exception as error:
        raise RunFailed(
            f"Ray, which starts the {ranks} workers, did not start on this machine ({error}): its processes' logs are "
            f"in session_latest/logs of its temporary folder, /tmp/ray unless $RAY_TMPDIR is set"
        ) from error


def _too_small(ranks: int) -> bool:
    """Whether Ray was started here for a smaller run, whose workers have ended: new ones would wait for its cores."""
    ours = _joined_here and not os.environ.get("RAY_ADDRESS") and _Placement.open == 0
    return ours and ray.cluster_resources().get("CPU", 0.0) < ranks


def leave_ray() -> None:
    """Ends the Ray that `start_ray` started, or leaves the cluster that it joined; one that the caller joined stays."""
    global _joined_here
    if _joined_here:
        _joined_here = False
        ray.shutdown()


def require_answer(address: str) -> None:
    """ValueError where $RAY_ADDRESS is host:port and nobody listens there; Ray itself would ask for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto", or a form of Ray's own
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error.strerror or error}): start one with "
            f"ray start --head, correct the address, or unset it to start Ray on this machine"
        ) from error


def free_weights_of(pids: Sequence[int]) -> None:
    """Frees what killed ranks of this machine shared; on another machine the next run does it."""
    ranks = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks.append(psutil.Process(pid))
    psutil.wait_procs(ranks, timeout=STOP_TIMEOUT_S)
    remove_stale()


def last_lines(outputs: Sequence[str]) -> str:
    """The end of what a worker wrote to these files; says so when they are not on this machine."""
    texts = [Path(path).read_text(errors="replace").splitlines() for path in outputs if Path(path).is_file()]
    lines = [line for text in texts for line in text[-LAST_LOG_LINES:] if not line.startswith(":")]
    return "its last lines:\n  " + "\n  ".join(lines) if lines else "(it left no output on this machine)"
