"""One trainer, two replicas that are killed, stopped and restarted at random, and an account of everything asked for.

Groups are asked for all the while, and new weights are published every few seconds by every transport, as deltas and as
adapters. The weights show their version in each token (`versioned_canary`), so every sample is compared with what it
must be: a lost, repeated or wrongly labelled token fails the run, and so does whatever is left behind at its end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import versioned_canary as canary
from held import Held, Life, mapped_weights
from restarted_server import ABSENCES, RestartedServer
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import RolloutError
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.replicas import Replica
from skyrl_rollout.requests import DETACH_GRACE_S
from skyrl_rollout.tokens import FinishReason, Generation, LogprobMode, Sample, Sampling
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget, WeightPublisher

NUM_CALLERS = 12
CALL_S = 120.0
RECOVERY_S = 90.0
LONGEST_ABSENCE_S = 45.0
LOOK_S, PROGRESS_S = 1.0, 10.0
CLOSING_S = 3.0  # a closed channel's sockets go a moment later
GROWTH_BYTES = 16 << 20  # 4 updates
MORE_DESCRIPTORS = 8
NEVER = ("\x7f",)  # a stop string that no token stands for: such a sample is made again whole when its server is lost
POLICY = "red"
TRANSPORTS = {"shm": 5, "inline": 3, "file": 2}
SERVER = (
    *("--logits", "canary", "--token-delay-ms", "20", "--delta"),
    *("--drain-grace-s", "1", "--request-retention-s", "10"),
)


@dataclass
class Summary:
    """What was done and what came of it. repeated: samples asked for a second time. missed: how often one replica was
    left out of a publish. growth: resident bytes more than in a process's first fifth, the most of any."""

    asked: int = 0
    samples: int = 0
    tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    published: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    catch_ups: int = 0
    disturbed: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    kept_tokens: int = 0
    made_again: int = 0
    growth: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        growth = ", ".join(f"{name} {nbytes / 2**20:+.1f} MiB" for name, nbytes in self.growth.items())
        return (
            f"{self.samples} of {self.asked} samples arrived with {self.tokens} tokens ({_told(self.ends)}), "
            f"{self.repeated} of them asked for twice; {self.published.total()} publishes ({_told(self.published)}), "
            f"{self.missed} missed by a replica, {self.catch_ups} catch-ups; {self.disturbed.total()} disturbances "
            f"({_told(self.disturbed)}); {self.moves} moves of a sample kept {self.kept_tokens} tokens, "
            f"{self.made_again} requests were made again; resident memory: {growth}"
        )


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


class Soak:
    """One run of `seconds`; `events` are the last things that happened.

    Each quarter of the time spares one of the two replicas: it is stopped at times and never ended then, so that its
    memory can be watched for long.
    """

    def __init__(self, *, seconds: float, seed: int, folder: Path, say: Callable[[str], None] = print) -> None:
        self.seconds, self.seed, self._say = seconds, seed, say
        self.events: deque[str] = deque(maxlen=100)
        self.done = Summary()
        self._updates = folder / "updates"
        self._updates.mkdir()
        model = canary.write_model(folder / "model")
        self._flags = (*SERVER, "--model", str(model), "--update-root", str(self._updates))
        self._expectation = canary.Expectation()
        self._lock = asyncio.Lock()  # held while weights move
        self._began = time.monotonic()

    def note(self, what: str) -> None:
        """Remembers something that happened."""
        self.events.append(f"{self._elapsed_s:8.2f} s  {what}")

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def _is_over(self) -> bool:
        return self._elapsed_s >= self.seconds

    def _chance(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {what}")

    async def run(self) -> Summary:
        """Raises AssertionError, or an ExceptionGroup around it, for anything that is not as it must be."""
        with _listening(self.note):
            async with self._opened():
                await self._publish(self._chance("warm up"))  # what is made once and kept is there from here on
                await self._ask(self._chance("warm up"), "")
            await asyncio.sleep(CLOSING_S)
            before = Held.now(self._updates)
            self._began, self.done = time.monotonic(), Summary()
            async with self._opened():
                await self._publish(self._chance("first"))
                await self._go_on()
                await self._settle()
            await self._check_leftovers(before)
        assert self.done.samples == self.done.asked
        return self.done

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            self._servers = [stack.enter_context(RestartedServer(name, *self._flags)) for name in ("a", "b")]
            self._pool = await stack.enter_async_context(await RolloutPool.connect([s.url for s in self._servers]))
            self._epoch = await self._pool.acquire_control("soak")
            self._controlled = {r.url: r.instance_id for r in self._pool.replicas}
            self._publishers = {
                name: WeightPublisher(name, folder=self._updates if name == "file" else None) for name in TRANSPORTS
            }
            for publisher in self._publishers.values():
                stack.callback(publisher.close)
            self._version = self._adapter_version = 0
            self._offered: dict[str, set[tuple[str, int]]] = {}  # instance -> (policy, version)
            self._me = Life(os.getpid())
            yield

    async def _go_on(self) -> None:
        """Everything at once until the time is over, and the last absence with it."""
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(work) for work in (self._tend(), self._watch())]
            callers = [self._call(number) for number in range(NUM_CALLERS)]
            await asyncio.wait([group.create_task(w) for w in (self._publish_on(), self._disturb(), *callers)])
            for task in beside:
                task.cancel()

    # The trainer

    async def _publish_on(self) -> None:
        chance = self._chance("publish")
        while not self._is_over:
            await self._publish(chance)
            if chance.random() < 0.25:
                await self._adapt(chance)
            await asyncio.sleep(chance.uniform(1.0, 5.0))

    async def _publish(self, chance: random.Random) -> None:
        transport = chance.choices(list(TRANSPORTS), list(TRANSPORTS.values()))[0]
        wants_delta = chance.random() < 0.5
        async with self._lock:
            await self._pool.refresh()
            version = max(self._pool.highest_version(), self._version) + 1
            self._publisher = self._publishers[transport]
            base = self._publisher.published_version if wants_delta else None
            targets = await self._targets(self._pool.replicas)
            with self._offering(targets, ("", version)):
                report = await self._publisher.publish(
                    canary.LAYOUT, canary.tensors(version), targets,
                    target_version=version, base_version=base, timeout_s=CALL_S,
                )  # fmt: skip
            self._version = version
            self._pool.expect(version)
            await self._pool.refresh()
        self._count_publish(transport, report)

    async def _adapt(self, chance: random.Random) -> None:
        """An adapter over the weights that serve, and a group that is made with it."""
        async with self._lock:
            self._adapter_version += 1
            version = self._adapter_version
            targets = await self._targets([r for r in self._pool.replicas if not self._pool.is_stale(r)])
            with self._offering(targets, (POLICY, version)):
                report = await self._publisher.publish_adapter(
                    POLICY, canary.ADAPTER_LAYOUT, canary.adapter_tensors(version), targets,
                    rank=1, alpha=1.0, target_modules=("embed_tokens",), target_version=version, timeout_s=CALL_S,
                )  # fmt: skip
            await self._pool.refresh()
        self._count_publish(self._publisher.transport, report)
        sampling = Sampling(max_tokens=40, seed=chance.getrandbits(60))
        await self._checked(_prompt(chance), sampling, 4, policy_id=POLICY)

    def _count_publish(self, transport: str, report: PublishReport) -> None:
        self.done.published[f"{report.kind} {transport}"] += 1
        self.done.missed += len(self._servers) - len(report.committed)
        self.note(f"{report.kind} {report.target_version} by {transport} at {list(report.committed)} {report.failed}")

    async def _targets(self, replicas: Sequence[Replica]) -> list[PublishTarget]:
        ready = [r for r in replicas if r.away_since is None and await self._control(r)]
        return [PublishTarget(r.url, self._epoch) for r in ready]

    async def _control(self, replica: Replica) -> bool:
        if self._controlled.get(replica.url) == replica.instance_id:
            return True
        try:
            self._epoch = await self._pool.extend_control(replica, "soak", self._epoch)
        except RolloutError as error:
            self.note(f"{replica.url} is not under control: {error}")
            return False
        self._controlled[replica.url] = replica.instance_id
        return True

    async def _tend(self) -> None:
        while True:
            async with self._lock:
                for replica in self._pool.stale():
                    await self._bring_back(replica)
            await self._pool.changed(1.0)
            await asyncio.sleep(0.05)

    async def _bring_back(self, replica: Replica) -> None:
        if not (targets := await self._targets([replica])):
            return
        try:
            with self._offering(targets, ("", self._version), (POLICY, self._adapter_version)):
                await self._publisher.catch_up(targets, timeout_s=CALL_S)
            await replica.look()
        except RolloutError as error:
            self.note(f"{replica.url} could not catch up: {error}")
            return
        self.done.catch_ups += 1
        self.note(f"{replica.url} caught up with version {self._version}")

    @contextmanager
    def _offering(self, targets: Sequence[PublishTarget], *versions: tuple[str, int]) -> Iterator[None]:
        """Notes which processes may serve these from now on: those that answer now, or at the end."""
        servers = [s for s in self._servers if s.url in {t.url for t in targets}]
        try:
            for server in servers:
                self._offered.setdefault(server.instance_id, set()).update(versions)
            yield
        finally:
            for server in servers:
                self._offered.setdefault(server.instance_id, set()).update(versions)

    # The callers

    async def _call(self, number: int) -> None:
        chance = self._chance(f"caller {number}")
        while not self._is_over:
            await self._ask(chance, chance.choice(("", f"caller {number}")))

    async def _ask(self, chance: random.Random, affinity: str) -> None:
        prompt, num_samples = _prompt(chance), chance.randint(1, 4)
        stops = NEVER if chance.random() < 0.1 else ()
        sampling = Sampling(max_tokens=chance.randint(8, 200), seed=chance.getrandbits(60), stop_strings=stops)
        on_commit = "stop" if chance.random() < 0.1 else "continue"
        first = await self._checked(prompt, sampling, num_samples, affinity=affinity, on_commit=on_commit)
        if chance.random() < 0.1 and _versions(first) == {self._version}:
            again = await self._checked(prompt, sampling, num_samples)
            if _versions(again) == _versions(first) and on_commit == "continue":
                for one, other in zip(first.samples, again.samples, strict=True):
                    assert np.array_equal(one.token_ids, other.token_ids) and one.finish_reason is other.finish_reason
                self.done.repeated += num_samples

    async def _checked(self, prompt: list[int], sampling: Sampling, num_samples: int, **options: Any) -> Generation:
        """All samples of one request, each whole and right."""
        policy_id, since = options.get("policy_id", ""), self._version
        self.done.asked += num_samples
        generation = await self._pool.generate(
            prompt, sampling, mode=LogprobMode.RAW, timeout_s=CALL_S, num_samples=num_samples, **options
        )
        assert len(generation.samples) == num_samples, f"{len(generation.samples)} of {num_samples} samples arrived"
        for index, sample in enumerate(generation.samples):
            self._expectation.check(
                prompt, sampling, index, sample,
                stops_on_commit=options.get("on_commit") == "stop", adapter_over=since if policy_id else None,
            )  # fmt: skip
            self._check_versions(sample, policy_id, 0 if policy_id else since)
            self.done.ends[sample.finish_reason.name] += 1
            self.done.tokens += len(sample.token_ids)
        self.done.samples += num_samples
        self.done.moves += generation.num_moves
        self.done.kept_tokens += generation.num_kept_tokens
        self.done.made_again += generation.num_restarts
        return generation

    def _check_versions(self, sample: Sample, policy_id: str, since: int) -> None:
        served = set[tuple[str, int]]().union(*(self._offered.get(i, set()) for i in sample.instance_ids))
        for version in sorted(set(sample.weight_versions.tolist())):
            assert version >= since, f"version {version} served a request of version {since}: {sample.spans}"
            assert (policy_id, version) in served, (
                f"version {version} of policy {policy_id!r} was never given to {sample.instance_ids}: {sample.spans}"
            )

    # What disturbs, and what is watched

    async def _disturb(self) -> None:
        chance, longest_s = self._chance("disturb"), min(LONGEST_ABSENCE_S, self.seconds / 12)
        while not self._is_over:
            await asyncio.sleep(chance.uniform(0.5, 5.0))
            way, away_s = chance.choice(list(ABSENCES)), longest_s * chance.random() ** 2
            spared = int(4 * self._elapsed_s / self.seconds) % 2
            server = chance.choice(self._servers) if way == "stop" else self._servers[1 - spared]
            self.note(f"{way} {server.name}, {server.instance_id} at {server.url}, for {away_s:.1f} s")
            await ABSENCES[way](server, away_s)
            self.note(f"{server.name} is there again as {server.instance_id}")
            self.done.disturbed[way] += 1
            await self._all_serve()

    async def _all_serve(self) -> None:
        """Returns when both replicas serve the last version and no publish is under way that left one out."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            async with self._lock:
                waiting = [
                    f"{s.name}: {r.state}, version {r.version} of {self._version}, away for {r.away_s:.0f} s"
                    for s, r in zip(self._servers, self._pool.replicas, strict=True)
                    if not r.takes_work or self._pool.is_stale(r) or r.instance_id != s.instance_id
                ]
            if not waiting:
                return
            assert time.monotonic() < deadline, f"not serving after {RECOVERY_S:g} s: {waiting}"
            await self._pool.changed(0.2)

    async def _watch(self) -> None:
        next_progress_s = 0.0
        while True:
            for life in (self._me, *(server.life for server in self._servers)):
                life.look()
            if self._elapsed_s >= next_progress_s:
                next_progress_s += PROGRESS_S
                self._say(self._progress())
            await asyncio.sleep(LOOK_S)

    def _progress(self) -> str:
        d, left_s = self.done, max(0.0, self.seconds - self._elapsed_s)
        sizes = [max(life.sizes[-1:], default=0) >> 20 for life in (self._me, *(s.life for s in self._servers))]
        return (
            f"soak {self._elapsed_s:4.0f} s, {left_s:4.0f} s left | {d.samples} samples, {d.tokens} tokens | "
            f"version {self._version} | {_told(d.disturbed) or 'undisturbed'} | {d.moves} moves | "
            f"client {sizes[0]} MiB, servers {sizes[1]} and {sizes[2]} MiB"
        )

    async def _settle(self) -> None:
        """Both serve the last version, and hold nothing of the work that is done."""
        await self._publish(self._chance("last"))
        await self._all_serve()
        for server, client in zip(self._servers, self._pool.clients, strict=True):
            assert (await client.refresh()).weight_version == self._version
            await self._until_idle(server, client)
            assert not mapped_weights(server.process.pid), f"{server.name} maps {mapped_weights(server.process.pid)}"

    async def _until_idle(self, server: RestartedServer, client: RolloutClient) -> None:
        """A server that was stopped while its work moved on has not heard so: it ends that work after its grace."""
        deadline = time.monotonic() + DETACH_GRACE_S + 5.0
        while True:
            status = await client.status()
            if (status.running, status.waiting, status.open_update_id) == (0, 0, ""):
                return
            assert time.monotonic() < deadline, f"{server.name} holds work that nobody waits for: {status}"
            await asyncio.sleep(0.5)

    async def _check_leftovers(self, before: Held) -> None:
        deadline = time.monotonic() + 5 * CLOSING_S
        gc.collect()
        while (left := Held.now(self._updates).beyond(before)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        assert not left, f"left behind: {', '.join(left)}"
        least_looks = 0.15 * self.seconds / LOOK_S  # a spared server lives for a quarter of the time
        lives = [life for s in self._servers for life in (*s.ended_lives, s.life) if len(life.sizes) >= least_looks]
        assert len(lives) >= 2, "no server lived long enough to be watched"
        most = max(life.growth_bytes for life in lives)
        self.done.growth = {"client": self._me.growth_bytes, f"{len(lives)} servers": most}
        assert max(self.done.growth.values()) < GROWTH_BYTES, f"a process grew: {self.done}"
        for life in (self._me, *lives):
            assert life.more_descriptors <= MORE_DESCRIPTORS, f"{life.more_descriptors} more descriptors: {life.kinds}"


def _prompt(chance: random.Random) -> list[int]:
    return chance.choices(range(canary.VOCAB), k=chance.randint(1, 48))


def _versions(generation: Generation) -> set[int]:
    """Of its samples, where each ended by itself; else none."""
    if any(sample.finish_reason is FinishReason.VERSION_CHANGED for sample in generation.samples):
        return set()
    return {int(version) for sample in generation.samples for version in sample.weight_versions}


@contextmanager
def _listening(note: Callable[[str], None]) -> Iterator[None]:
    """What the packages log becomes a note, and is kept nowhere else."""
    logger, handler = logging.getLogger("skyrl_rollout"), logging.Handler()
    handler.emit = lambda record: note(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
