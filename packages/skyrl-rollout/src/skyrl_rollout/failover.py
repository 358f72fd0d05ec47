"""One generation request until all its samples have ended, on as many replicas as that takes: nothing lost or made
twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_rollout import wire
from skyrl_rollout.assembly import Assembly
from skyrl_rollout.errors import Draining, Poisoned, RolloutError, ServerReplaced, ServerUnreachable, UnknownPolicy
from skyrl_rollout.replicas import Replica
from skyrl_rollout.seeds import continued_seed
from skyrl_rollout.splice import ended, spliced
from skyrl_rollout.tokens import FinishReason, Generation, LogprobMode, Sample, Sampling

log = logging.getLogger(__name__)

TOKENS_PER_EVENT = 64
MAX_EVENT_DELAY_S = 2.0  # what is not heard for so long may be made again; more events would only cost
_MOVES = (ServerUnreachable, ServerReplaced, Draining, Poisoned)  # the replica is at fault, not the request


@dataclass(frozen=True)
class Ask:
    """What a caller wants. deadline: in the event loop's time. unreachable_s: how long a replica may stay away; None:
    until the deadline. options: further arguments of `RolloutClient.generate_events`. may_be_missing: its policy was
    published everywhere, so that a replica which does not know it has restarted and will get it again."""

    request_id: str
    prompt_token_ids: np.ndarray
    sampling: Sampling
    mode: LogprobMode
    num_samples: int
    deadline: float
    min_weight_version: int | None = None
    on_commit: str = "continue"
    affinity: str = ""
    on_progress: Callable[[int], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    may_be_missing: bool = False


# (least weight version, urls to avoid, the error that brought us here) -> (replica, how long it may stay away)
Choose = Callable[[int, set[str], RolloutError | None], Awaitable[tuple[Replica, float | None]]]


def can_continue(sampling: Sampling, on_commit: str) -> bool:
    """Whether a sample may go on from its tokens on another replica; else it is made again whole.

    Not where what follows depends on what was output, rather than on prompt and output together: stop strings (one may
    straddle the seam), frequency and presence penalties; nor where versions must not mix (on_commit "stop").
    """
    return (
        not sampling.stop_strings
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
        and on_commit == "continue"
    )


class Relay:
    """Runs one `Ask`. The first attempt asks for all samples at once; when its replica is lost, what has finished is
    kept, and each other sample goes on from its tokens as a request of its own, all on one replica."""

    def __init__(self, ask: Ask, choose: Choose) -> None:
        self._ask, self._choose = ask, choose
        self._moves: tuple[type[RolloutError], ...] = (*_MOVES, UnknownPolicy) if ask.may_be_missing else _MOVES
        self._continues = can_continue(ask.sampling, ask.on_commit)
        self._kept: list[Sample | None] = [None] * ask.num_samples
        self._finished: set[int] = set()
        self._active: set[Assembly] = set()
        self._avoid: set[str] = set()
        self._attempts = self._num_restarts = self._num_moves = self._num_kept_tokens = 0
        self._eos: tuple[int, ...] = ()

    async def run(self) -> Generation:
        """Raises what the server says about the request itself, DeadlineExceeded, or ServerUnreachable where no replica
        could be asked until the deadline."""
        ask, error = self._ask, None
        while True:
            whole = self._assembly(ask.prompt_token_ids, ask.num_samples)
            error = await self._attempt(whole, ask.prompt_token_ids, ask.sampling, error)
            for i in range(ask.num_samples):
                self._keep(i, whole, i, error)
            if self._finished or any(kept is not None for kept in self._kept):
                break
            self._num_restarts += 1
        await _all([self._finish(i, whole, error) for i in range(ask.num_samples) if i not in self._finished])
        return whole.generation(
            samples=[kept for kept in self._kept if kept is not None],
            num_restarts=self._num_restarts,
            num_moves=self._num_moves,
            num_kept_tokens=self._num_kept_tokens,
        )

    async def _finish(self, index: int, whole: Assembly, error: RolloutError | None) -> None:
        """Asks for the rest of one sample until it has ended."""
        assert whole.started is not None
        effective = whole.started.effective
        while index not in self._finished:
            kept, tokens = self._kept[index], self._ask.prompt_token_ids
            made = 0 if kept is None else len(kept.token_ids)
            if kept is not None and (done := ended(kept, effective, self._eos)) is not None:
                self._kept[index] = done  # only the word that it had ended was lost
                self._finished.add(index)
                return
            if kept is not None:
                tokens = np.concatenate([tokens, kept.token_ids])
            self._num_moves += made > 0
            self._num_restarts += made == 0
            self._num_kept_tokens += made
            part = self._assembly(tokens, 1)
            error = await self._attempt(part, tokens, _rest(effective, index, made), error, after=kept)
            self._keep(index, part, 0, error)

    async def _attempt(
        self,
        assembly: Assembly,
        tokens: np.ndarray,
        sampling: Sampling,
        last: RolloutError | None,
        *,
        after: Sample | None = None,
    ) -> RolloutError | None:
        """Asks one replica; None when every sample ended there by itself, else why the others must go on elsewhere."""
        least = self._ask.min_weight_version
        if after is not None:  # versions never go back within a sample
            least = max(least or 0, int(after.weight_versions[-1]))
        replica, away_s = await self._choose(least or 0, self._avoid, last)
        self._eos = replica.client.info.model.eos_token_ids
        self._active.add(assembly)
        try:
            work = self._stream(replica, assembly, tokens, sampling, least=least, away_s=away_s)
            await replica.carry(work, assembly.num_samples)
            if assembly.has_aborted and await replica.is_ending():
                raise Draining(f"{replica.url} ended its work to shut down")
        except self._moves as error:
            replica.suspect(error.message)
            self._avoid.add(replica.url)
            log.warning("request %s moves from %s: %s", self._ask.request_id, replica.url, error.message)
            return error
        finally:
            self._active.discard(assembly)
        return None

    async def _stream(
        self,
        replica: Replica,
        assembly: Assembly,
        tokens: np.ndarray,
        sampling: Sampling,
        *,
        least: int | None,
        away_s: float | None,
    ) -> None:
        ask = self._ask
        events = replica.client.generate_events(
            tokens, sampling, mode=ask.mode, timeout_s=ask.deadline - asyncio.get_running_loop().time(),
            num_samples=assembly.num_samples, request_id=assembly.request_id, min_weight_version=least,
            on_commit=ask.on_commit, unreachable_s=away_s, tokens_per_event=TOKENS_PER_EVENT,
            max_event_delay_s=MAX_EVENT_DELAY_S, restarts=False, **ask.options,
        )  # fmt: skip
        async with aclosing(events):
            async for event in events:
                assembly.add(event)
                if ask.on_progress is not None:
                    kept = sum(len(sample.token_ids) for sample in self._kept if sample is not None)
                    ask.on_progress(kept + sum(a.num_tokens for a in self._active))

    def _assembly(self, tokens: np.ndarray, num_samples: int) -> Assembly:
        """Each attempt has a request id of its own: the first one's may be known where it comes by again."""
        suffix = f".{self._attempts}" if self._attempts else ""
        self._attempts += 1
        return Assembly(self._ask.request_id + suffix, wire.token_bytes(tokens), num_samples, self._ask.mode)

    def _keep(self, index: int, assembly: Assembly, place: int, error: RolloutError | None) -> None:
        """Takes over what sample `place` of an attempt has; one that its server cut off has not ended."""
        sample = assembly.so_far(place)
        cut_off = error is not None and sample.finish_reason is FinishReason.ABORTED
        if assembly.has_finished(place) and not cut_off:
            self._kept[index] = spliced(self._kept[index], sample)
            self._finished.add(index)
        elif self._continues and len(sample.token_ids):
            self._kept[index] = spliced(self._kept[index], sample)


def _rest(effective: Sampling, index: int, made: int) -> Sampling:
    """What to ask for after `made` tokens of sample `index`; sample i of a seeded request draws with seed + i."""
    left = None if effective.max_tokens is None else effective.max_tokens - made
    seed = None if effective.seed is None else continued_seed(effective.seed + index, made)
    return replace(effective, max_tokens=left, min_tokens=max(0, effective.min_tokens - made), seed=seed)


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of it; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
