"""What a Generate stream said, event by event, read as slowly or as quickly as a check wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from skyrl_rollout.conformance.item import Failed, expect
from skyrl_rollout.v1 import generation_pb2 as pb

Span = tuple[int, int, int, int]


@dataclass
class Answer:
    """Every event of one stream, in order. finished: sample index -> SampleFinished."""

    seqs: list[int] = field(default_factory=list)
    started: pb.Started | None = None
    deltas: list[pb.TokenDelta] = field(default_factory=list)
    finished: dict[int, pb.SampleFinished] = field(default_factory=dict)
    heartbeats: list[pb.Heartbeat] = field(default_factory=list)

    def take(self, m: pb.GenerateResponse) -> None:
        """Adds one message; an event that is not known is ignored."""
        kind = m.WhichOneof("event")
        if kind == "heartbeat":
            self.heartbeats.append(m.heartbeat)
            return
        self.seqs.append(m.seq)
        if kind == "started":
            self.started = m.started
        elif kind == "delta":
            self.deltas.append(m.delta)
        elif kind == "sample_finished":
            expect(
                m.sample_finished.sample_index not in self.finished,
                f"sample {m.sample_finished.sample_index} finished twice",
            )
            self.finished[m.sample_finished.sample_index] = m.sample_finished

    def tokens(self, sample: int = 0) -> list[int]:
        """Ids of one sample."""
        return np.frombuffer(self._joined("token_ids", sample), "<i4").tolist()

    def logprobs(self, sample: int = 0) -> np.ndarray:
        """float32 [n] of one sample."""
        return np.frombuffer(self._joined("logprobs", sample), "<f4")

    def top(self, sample: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(int32 [n, k], float32 [n, k]): the most probable tokens of every position."""
        deltas = [d for d in self.deltas if d.sample_index == sample]
        k = max((d.top.k for d in deltas), default=0)
        expect(k > 0, "no top logprobs came with the tokens, though they were asked for")
        ids = np.frombuffer(b"".join(d.top.token_ids for d in deltas), "<i4")
        logprobs = np.frombuffer(b"".join(d.top.logprobs for d in deltas), "<f4")
        n = len(self.tokens(sample))
        expect(len(ids) == len(logprobs) == n * k, f"{len(ids)} top ids for {n} tokens with k {k}")
        return ids.reshape(-1, k), logprobs.reshape(-1, k)

    def spans(self, sample: int = 0) -> list[Span]:
        """(start, length, weight version, oldest KV version)."""
        return [(s.start, s.length, s.weight_version, s.oldest_kv_version) for s in self.end(sample).spans]

    def end(self, sample: int = 0) -> pb.SampleFinished:
        """Raises Failed where the sample never finished."""
        if sample not in self.finished:
            raise Failed(f"the stream ended without SampleFinished for sample {sample}")
        return self.finished[sample]

    def reason(self, sample: int = 0) -> str:
        """ "LENGTH", "ABORTED", ..."""
        return pb.FinishReason.Name(self.end(sample).reason).removeprefix("FINISH_REASON_")

    @property
    def version(self) -> int:
        """The weight version that Started names."""
        return self.began.weight_version

    @property
    def began(self) -> pb.Started:
        """Raises Failed where there was no Started."""
        if self.started is None:
            raise Failed("the stream has no Started event")
        return self.started

    def _joined(self, name: str, sample: int) -> bytes:
        return b"".join(getattr(d, name) for d in self.deltas if d.sample_index == sample)


class Reading:
    """One open stream; nothing is read but what is asked for."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.call, self.answer = call, Answer()

    async def next(self) -> pb.GenerateResponse | None:
        """The next message, None at the end."""
        m = await self.call.read()
        if m is grpc.aio.EOF:
            return None
        self.answer.take(m)
        return m

    async def until(self, holds: Callable[[Answer], bool], what: str, timeout_s: float = 20.0) -> Answer:
        """Reads until `holds`. Raises Failed when the stream ends, or time runs out, before."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(self.answer):
                    if await self.next() is None:
                        raise Failed(f"the stream ended before {what}")
        except TimeoutError:
            raise Failed(f"not within {timeout_s:g} s: {what}") from None
        return self.answer

    async def tokens(self, count: int) -> Answer:
        """Reads until `count` tokens of sample 0 are there."""
        return await self.until(lambda a: len(a.tokens()) >= count, f"{count} tokens")

    async def rest(self, timeout_s: float = 45.0) -> Answer:
        """Reads to the end."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.next() is not None:
                    pass
        except TimeoutError:
            raise Failed(f"the stream did not end within {timeout_s:g} s") from None
        return self.answer

    def drop(self) -> None:
        """Cancels the call."""
        self.call.cancel()
