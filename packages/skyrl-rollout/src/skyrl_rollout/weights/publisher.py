"""New weights to every replica or to none: all servers have verified the bytes before the first one commits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from skyrl_rollout.calls import Deadline
from skyrl_rollout.errors import MissingCapability, ModelMismatch, RolloutError, VersionConflict
from skyrl_rollout.weights import shm
from skyrl_rollout.weights.arena import Arena
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, differences
from skyrl_rollout.weights.update import PublishTarget, ServerUpdate

__all__ = ["PublishIncomplete", "PublishReport", "PublishTarget", "WeightPublisher"]

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shm", "inline")
_SHOWN_DIFFERENCES = 20


class PublishIncomplete(RolloutError):
    """Some replicas committed and others did not: `committed` and `failed` name them. The failed ones serve an older
    version until a later publish reaches them."""

    code, reason = grpc.StatusCode.ABORTED, "PUBLISH_INCOMPLETE"

    def __init__(self, committed: Sequence[str], failed: dict[str, BaseException]) -> None:
        said = "; ".join(f"{url}: {error}" for url, error in failed.items())
        super().__init__(
            f"{len(committed)} of {len(committed) + len(failed)} replicas committed ({', '.join(committed)}), the "
            f"others serve older weights until the next publish ({said})"
        )
        self.committed = tuple(committed)
        self.failed = dict(failed)


@dataclass(frozen=True)
class PublishReport:
    """seconds: phase ("look", "copy", "begin", "transfer", "seal", "commit") -> wall clock. transports: url -> "shm" or
    "inline". stall_s: the longest time that a replica produced no token."""

    target_version: int
    nbytes: int
    seconds: dict[str, float]
    transports: dict[str, str]
    stall_s: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class WeightPublisher:
    """Keeps one arena between publishes. transport: "auto" takes shared memory where the server can see ours."""

    def __init__(self, transport: str = "auto") -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport {transport!r} is not known: one of {', '.join(TRANSPORTS)}")
        self.transport = transport
        self._arena: Arena | None = None
        self._publishing = False
        for name in shm.remove_stale():
            log.warning("removed shared memory %s, left by a process that is gone", name)

    async def publish(
        self,
        layout: Sequence[TensorLayout],
        tensors: Iterable[tuple[str, memoryview]],
        targets: Sequence[PublishTarget],
        *,
        target_version: int,
        timeout_s: float,
    ) -> PublishReport:
        """Replaces the weights of all `targets` by `tensors`, each once and in any order, as version `target_version`.

        tensors is read on the calling thread, after every server has accepted the layout. Raises ModelMismatch naming
        the tensors that differ (nothing was copied), ValueError for tensors that are not those of `layout`,
        VersionConflict, CorruptBytes, ServerUnreachable, DeadlineExceeded: no replica moved. PublishIncomplete: some
        did.
        """
        if self._publishing:
            raise ValueError("a publish is under way on this publisher; wait for it")
        if not layout or not targets or len({t.url for t in targets}) != len(targets):
            raise ValueError(f"a publish needs tensors and distinct targets, got {len(layout)} and {list(targets)}")
        deadline = Deadline(timeout_s, f"publishing version {target_version}")
        updates: list[ServerUpdate] = []
        self._publishing = True
        try:
            updates += [ServerUpdate(target, deadline) for target in targets]
            return await self._publish(layout, tensors, updates, target_version)
        finally:
            await self._end(updates)
            self._publishing = False

    async def _publish(
        self,
        layout: Sequence[TensorLayout],
        tensors: Iterable[tuple[str, memoryview]],
        updates: Sequence[ServerUpdate],
        target_version: int,
    ) -> PublishReport:
        seconds: dict[str, float] = {}
        with _timed(seconds, "look"):
            await _all(u.look() for u in updates)
            for u in updates:
                _check(u, layout, target_version)
        with _timed(seconds, "copy"):
            arena = self._arena_for(layout, updates)
            for name, data in tensors:
                updates[0].deadline.left_s(f"the copy of {name}")
                arena.write(name, data)
                await asyncio.sleep(0)  # rollouts go on streaming meanwhile
            manifest = Manifest(target_version, arena.specs())
        with _timed(seconds, "begin"):
            await _all(u.begin(manifest, arena) for u in updates)
        with _timed(seconds, "transfer"):
            await _all(u.transfer(arena) for u in updates)
        with _timed(seconds, "seal"):
            await _all(u.seal(arena) for u in updates)
        with _timed(seconds, "commit"):
            await _commit(updates)
        return PublishReport(
            target_version=target_version,
            nbytes=arena.nbytes,
            seconds=seconds,
            transports={u.target.url: u.transport for u in updates},
            stall_s=max(u.progress.stall_s for u in updates),
        )

    def _arena_for(self, layout: Sequence[TensorLayout], updates: Sequence[ServerUpdate]) -> Arena:
        """Chooses each target's transport and gives the arena that serves them all, the last one where it fits."""
        for u in updates:
            u.transport = self._transport_for(u)
        shared = any(u.transport == "shm" for u in updates)
        if self._arena is not None and not self._arena.fits(layout, shared=shared):
            self._drop_arena()
        if self._arena is None:
            try:
                self._arena = Arena(layout, shared=shared)
            except MemoryError as error:
                if self.transport != "auto" or not shared:
                    raise
                log.warning("%s; sending inline", error)
                for u in updates:
                    u.transport = "inline"
                self._arena = Arena(layout, shared=False)
        self._arena.begin()
        return self._arena

    def _transport_for(self, update: ServerUpdate) -> str:
        offered, ours = update.info.capabilities.transports, shm.namespace_id()
        visible = "shm" in offered and ours != "" and update.info.shm_namespace_id == ours
        chosen = self.transport if self.transport != "auto" else ("shm" if visible else "inline")
        if chosen == "shm" and not visible:
            raise ValueError(
                f"{update.target.url} does not see this process's shared memory (it runs on another host or in another "
                "container, or does not offer it): use transport='auto' or 'inline'"
            )
        if chosen not in offered:
            raise MissingCapability.named("transports", f"{update.target.url}: taking weights by {chosen!r}")
        return chosen

    async def _end(self, updates: Sequence[ServerUpdate]) -> None:
        """Aborts what was begun and not committed; an arena that a server may still read is not written again."""
        ending = asyncio.ensure_future(_abort_and_close(updates))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # a second Ctrl-C waits too, at most 5 s: servers must not be left with an open update
            raise
        finally:
            if any(u.progress.begun and not u.progress.ended for u in updates):
                self._drop_arena()

    def _drop_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def close(self) -> None:
        """Gives the memory back and unlinks its shared segment."""
        self._drop_arena()


def _check(update: ServerUpdate, layout: Sequence[TensorLayout], target_version: int) -> None:
    info = update.info
    wrong = differences(layout, info.model.tensors)
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN_DIFFERENCES} more" if len(wrong) > _SHOWN_DIFFERENCES else ""
        listed = "".join(f"\n  {line}" for line in wrong[:_SHOWN_DIFFERENCES])
        raise ModelMismatch(
            f"{info.url} serves another model ({info.model.name}): {len(wrong)} tensors differ{listed}{more}\n"
            "start the server with the trainer's model, or correct the url",
            violations=[(line.partition(": ")[0], line.partition(": ")[2]) for line in wrong],
        )
    if target_version <= info.weight_version:
        raise VersionConflict(
            f"{info.url} serves version {info.weight_version}, and versions only grow: publish above it, "
            f"not as {target_version}",
            details={"current_version": str(info.weight_version)},
        )


async def _commit(updates: Sequence[ServerUpdate]) -> None:
    results = await asyncio.gather(*(u.commit() for u in updates), return_exceptions=True)
    failed = {u.target.url: r for u, r in zip(updates, results, strict=True) if isinstance(r, BaseException)}
    committed = [u.target.url for u in updates if u.progress.committed]
    if failed and committed:
        raise PublishIncomplete(committed, failed)
    if failed:
        raise next(iter(failed.values()))


async def _abort_and_close(updates: Sequence[ServerUpdate]) -> None:
    await asyncio.gather(*(u.abort() for u in updates))
    await asyncio.gather(*(u.close() for u in updates))


async def _all(steps: Iterable[Awaitable[None]]) -> None:
    """Runs one step on every server; the first failure stops the others and is raised."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [e for t in tasks if t.done() and not t.cancelled() and (e := t.exception()) is not None]
        if failures:
            raise failures[0]
    finally:
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
