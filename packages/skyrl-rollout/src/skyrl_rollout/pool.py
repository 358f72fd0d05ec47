"""Several rollout servers as one: which replica takes a request, who takes over when one is gone, who may serve."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from skyrl_rollout import replicas
from skyrl_rollout.client import CALL_TIMEOUT_S, RolloutClient
from skyrl_rollout.errors import DeadlineExceeded, Fenced, RolloutError, ServerUnreachable
from skyrl_rollout.failover import Ask, Relay
from skyrl_rollout.replicas import Replica
from skyrl_rollout.security import Credentials
from skyrl_rollout.tokens import Generation, LogprobMode, Sampling

log = logging.getLogger(__name__)

REMEMBERED_AFFINITIES = 65_536
DRAIN_S = 60.0


class RolloutPool:
    """Made by `connect`; belongs to the event loop it is made on.

    Requests of one affinity go to one replica, whose cache has their prefix; the rest, and each new affinity, goes to
    the replica with the least load, by what this pool sends and what the servers report. A replica that is away,
    shutting down or STALE (below the version of `expect`) gets nothing until that is over.
    """

    def __init__(
        self, clients: Sequence[RolloutClient], *, credentials: Credentials | None = None, heartbeat_s: float = 5.0
    ) -> None:
        self._credentials, self._heartbeat_s = credentials, heartbeat_s
        self._changed = asyncio.Event()
        self._replicas = {c.url: Replica(c, self._note_change) for c in clients}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._expected: dict[str, int] = {}  # policy_id -> the version that a replica needs to get requests

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        credentials: Credentials | None = None,
        heartbeat_s: float = 5.0,
    ) -> Self:
        """Connects to all at the same time. Raises ValueError for no url or one given twice, else what the first
        failing replica raises; nothing stays open then."""
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"a pool needs at least one url and each only once, got {list(urls)}")
        dialled = await asyncio.gather(
            *(
                RolloutClient.connect(u, timeout_s=timeout_s, credentials=credentials, heartbeat_s=heartbeat_s)
                for u in urls
            ),
            return_exceptions=True,
        )
        failures = [d for d in dialled if isinstance(d, BaseException)]
        clients = [d for d in dialled if isinstance(d, RolloutClient)]
        if failures:
            await asyncio.gather(*(c.close() for c in clients))
            raise failures[0]
        return cls(clients, credentials=credentials, heartbeat_s=heartbeat_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Who is in it

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Those that are not leaving, in the order in which they came."""
        return tuple(r for r in self._replicas.values() if not r.is_leaving)

    @property
    def clients(self) -> tuple[RolloutClient, ...]:
        return tuple(r.client for r in self.replicas)

    async def add(self, url: str, *, timeout_s: float = CALL_TIMEOUT_S) -> Replica:
        """A further replica; while it is below the version of `expect` it gets no request. Raises ValueError for a url
        that is in the pool, and what `RolloutClient.connect` raises."""
        if url in self._replicas:
            raise ValueError(f"{url} is in the pool already")
        client = await RolloutClient.connect(
            url, timeout_s=timeout_s, credentials=self._credentials, heartbeat_s=self._heartbeat_s
        )
        self._replicas[url] = Replica(client, self._note_change)
        self._note_change()
        log.info("%s joined the pool, which has %d replicas now", url, len(self._replicas))
        return self._replicas[url]

    async def remove(self, url: str, *, drain_s: float = DRAIN_S) -> None:
        """Sends nothing new there, waits `drain_s` for what runs; what is left then goes on elsewhere with its tokens.

        Raises ValueError for a url that is not in the pool, and for the last one.
        """
        replica = self._replicas.get(url)
        if replica is None or replica.is_leaving:
            raise ValueError(f"{url} is not in the pool of {[r.url for r in self.replicas]}")
        if len(self.replicas) == 1:
            raise ValueError(f"{url} is the last replica of the pool: add another before it leaves")
        replica.is_leaving = True
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + drain_s
        while replica.num_samples and loop.time() < ends_at:
            await self._next_change(min(0.2, ends_at - loop.time()))
        replica.give_up("it leaves the pool")
        while replica.num_samples:
            await asyncio.sleep(0)
        del self._replicas[url]
        await replica.close()
        log.info("%s left the pool, which has %d replicas now", url, len(self._replicas))

    # Versions and control

    async def acquire_control(self, owner: str, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """One epoch for all replicas: the highest that any of them mints, claimed on each. Raises Fenced."""
        minted = await asyncio.gather(*(c.acquire_control(owner, timeout_s=timeout_s) for c in self.clients))
        highest = max(minted)
        behind = [c for c, epoch in zip(self.clients, minted, strict=True) if epoch < highest]
        await asyncio.gather(*(c.acquire_control(owner, claim_epoch=highest, timeout_s=timeout_s) for c in behind))
        return highest

    async def extend_control(
        self, replica: Replica, owner: str, epoch: int, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> int:
        """Brings a replica that joined or restarted under the trainer of `epoch`; returns the epoch of all from now on.

        It is higher where that replica has seen more trainers than the others. Raises Fenced where another trainer has
        taken over one of the others meanwhile: a zombie cannot come back this way.
        """
        seen = (await replica.client.refresh(timeout_s=timeout_s)).highest_trainer_epoch
        if seen <= epoch:
            return await replica.client.acquire_control(owner, claim_epoch=epoch, timeout_s=timeout_s)
        others = [r.client for r in self.replicas if r is not replica and r.takes_work]
        for info in await asyncio.gather(*(c.refresh(timeout_s=timeout_s) for c in others)):
            if info.highest_trainer_epoch > epoch:
                raise Fenced(f"trainer epoch {info.highest_trainer_epoch} owns {info.url}, this one is {epoch}: stop")
        minted = await replica.client.acquire_control(owner, timeout_s=timeout_s)
        await asyncio.gather(*(c.acquire_control(owner, claim_epoch=minted, timeout_s=timeout_s) for c in others))
        return minted

    async def refresh(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Asks every replica that is not away for its committed versions again; one that does not answer is away."""
        asked = [r for r in self.replicas if r.away_since is None] or list(self.replicas)
        timeout_s = timeout_s if len(asked) == 1 else min(timeout_s, replicas.SILENCE_S)
        answers = await asyncio.gather(*(r.look(timeout_s=timeout_s) for r in asked), return_exceptions=True)
        failures = [a for a in answers if isinstance(a, BaseException)]
        for replica, answer in zip(asked, answers, strict=True):
            if isinstance(answer, RolloutError):
                replica.suspect(answer.message)
        if len(failures) == len(asked):
            raise failures[0]

    def highest_version(self, policy_id: str = "") -> int:
        """The highest committed version of a policy over the replicas, as last reported; 0 where none has it."""
        return max(r.versions.get(policy_id, 0) for r in self.replicas)

    def expect(self, version: int, policy_id: str = "") -> None:
        """From now on replicas below `version` are STALE: they get no request until they have caught up. A new version
        of the base ends what was expected of adapters, which it drops."""
        self._expected = ({} if policy_id == "" else self._expected) | {policy_id: version}
        self._note_change()

    def is_stale(self, replica: Replica) -> bool:
        return any(replica.versions.get(policy_id, 0) < version for policy_id, version in self._expected.items())

    def stale(self) -> tuple[Replica, ...]:
        """Those that answer and have to catch up."""
        return tuple(r for r in self.replicas if r.away_since is None and self.is_stale(r))

    async def changed(self, timeout_s: float) -> None:
        """Returns when a replica came, went, or changed state or version, or after `timeout_s`."""
        await self._next_change(timeout_s)

    # Requests

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        *,
        mode: LogprobMode,
        timeout_s: float,
        num_samples: int = 1,
        min_weight_version: int | None = None,
        on_commit: str = "continue",
        affinity: str = "",
        on_progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Continues a prompt on the replica that `affinity` names, and returns every sample, each verified.

        A replica that is unreachable for 10 s, was replaced, drains or leaves loses its work to another one. What was
        received is kept: finished samples as they are, others go on elsewhere from their tokens, all of them together,
        with what is left of max_tokens and min_tokens and with `seeds.continued_seed`: the reference server then makes
        the tokens that the lost one would have made; other engines make other, equally random ones. A sample that
        cannot be continued exactly (`failover.can_continue`: stop strings, frequency and presence penalties, on_commit
        "stop") is made again whole. Versions never go back within a sample. `Generation` and `Sample` tell what moved.
        options: further arguments of `RolloutClient.generate_events`.
        """
        request_id, loop = str(uuid.uuid4()), asyncio.get_running_loop()
        # a process may have been replaced a moment ago: it is told, too, what is expected of it
        expected = self._expected.get(options.get("policy_id", ""), 0)
        least = max(min_weight_version or 0, expected) or None
        ask = Ask(
            request_id, np.asarray(prompt_token_ids), sampling, mode, num_samples, loop.time() + timeout_s,
            min_weight_version=least, on_commit=on_commit, affinity=affinity or request_id,
            on_progress=on_progress, options=options, may_be_missing=expected > 0,
        )  # fmt: skip

        async def choose(least: int, avoid: set[str], last: RolloutError | None) -> tuple[Replica, float | None]:
            replica = await self._choose(ask, least, avoid, last)
            return replica, replicas.FAILOVER_S if len(self.replicas) > 1 else None

        try:
            return await Relay(ask, choose).run()
        finally:
            if not affinity:
                self._homes.pop(request_id, None)

    async def _choose(self, ask: Ask, least: int, avoid: set[str], last: RolloutError | None) -> Replica:
        """Waits for a replica that may serve. Raises `last`, else what keeps them from it, when the time is over."""
        loop = asyncio.get_running_loop()
        while True:
            serving = [r for r in self.replicas if r.takes_work and not self.is_stale(r)]
            # a version that nobody has yet is waited for by a server, which knows it first
            policy_id = ask.options.get("policy_id", "")
            candidates = [r for r in serving if r.versions.get(policy_id, 0) >= max(least, bool(policy_id))] or serving
            candidates = [r for r in candidates if r.url not in avoid] or candidates
            left = ask.deadline - loop.time()
            if candidates and left > 0:
                return self._home(ask.affinity, candidates)
            if left <= 0:
                raise last or self._nobody_serves(ask.request_id)
            await self._next_change(left)

    def _home(self, affinity: str, candidates: list[Replica]) -> Replica:
        known = self._homes.get(affinity)
        home = next((r for r in candidates if r.url == known), None)
        if home is None:
            home = min(candidates, key=lambda r: (r.load, r.num_assigned))
        self._homes[affinity] = home.url
        self._homes.move_to_end(affinity)
        if len(self._homes) > REMEMBERED_AFFINITIES:
            self._homes.popitem(last=False)
        return home

    def _nobody_serves(self, request_id: str) -> RolloutError:
        told = "; ".join(f"{r.url}: {self._condition(r)}" for r in self.replicas)
        if all(r.away_since is not None for r in self.replicas):
            return ServerUnreachable(f"request {request_id}: no rollout server answers ({told})")
        return DeadlineExceeded(f"request {request_id} found no replica that may serve in time ({told})")

    def _condition(self, replica: Replica) -> str:
        if replica.away_since is not None:
            return f"away for {replica.away_s:.0f} s ({replica.why_away})"
        for policy_id, version in self._expected.items():
            if (has := replica.versions.get(policy_id, 0)) < version:
                named = f" of policy {policy_id}" if policy_id else ""
                return f"STALE, it has version {has} of {version}{named}"
        return replica.state

    # Changes

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if any(r.takes_work for r in self._replicas.values()):
            for replica in self._replicas.values():
                if replica.away_s > replicas.FAILOVER_S:
                    replica.give_up(f"it has been away for {replica.away_s:.0f} s")

    async def _next_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        await asyncio.gather(*(r.close() for r in self._replicas.values()))
