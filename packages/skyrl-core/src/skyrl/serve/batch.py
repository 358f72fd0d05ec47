"""The step loop's state: which rows wait, which run in which slot, and what one step does to them.

Everything here runs on one thread. Between two model calls every row is whole: its ids, its KV and its logprobs agree.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from skyrl_rollout.reference.sampling import uniforms
from skyrl_rollout.server.engine import Adapter, EngineLoad
from skyrl_rollout.tokens import FinishReason
from skyrl_rollout.weights.manifest import TensorLayout

from skyrl.serve.adapters import Adapters
from skyrl.serve.kv_slots import BLOCK_TOKENS, rounded
from skyrl.serve.model import Fed, ServedModel
from skyrl.serve.prefixes import Prefix, PrefixStore
from skyrl.serve.rows import Row, Sample, Work
from skyrl.serve.sampling import draw, top

LOGITS_AT_ONCE = 1 << 24  # values of a call that needs the logits of every column
SHRINK_ABOVE = 4  # times what the running rows need


@dataclass(frozen=True)
class Limits:
    """max_rows: samples that run at once. step_tokens: columns of one model call. kv_bytes: for running rows.
    prefix_bytes: for KV kept beyond them."""

    max_rows: int = 256
    step_tokens: int = 8192
    kv_bytes: int = 1 << 30
    prefix_bytes: int = 1 << 28


@dataclass(frozen=True)
class _Call:
    """One model call: how many ids of which slots it sees, and whether all logits are read."""

    slots: list[int]
    counts: list[int]
    reads: bool


class Batch:
    """`running[i]` has slot i. `is_interrupted` is asked between model calls: the step then ends early."""

    def __init__(self, model: ServedModel, limits: Limits, is_interrupted: Callable[[], bool]) -> None:
        self.model, self.limits = model, limits
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.is_paused = False
        self.num_steps = 0
        self.adapters = Adapters(model.module)
        self.prefixes = PrefixStore(limits.prefix_bytes)
        self._is_interrupted = is_interrupted
        self._kv_tokens = max(limits.kv_bytes // model.kv_bytes_per_token, 1)

    @property
    def can_step(self) -> bool:
        return not self.is_paused and bool(self.running or self.waiting)

    def add(self, work: Work) -> None:
        """Its rows wait for a slot."""
        for row in work.rows:
            if not row.ended:
                bisect.insort(self.waiting, row, key=lambda r: r.order)

    def end(self, work: Work, reason: FinishReason) -> None:
        """Ends what is left of it and frees its slots."""
        for row in work.rows:
            row.end(reason)
        self._sweep()

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        """After this no step is made; everything that was made has been handed over."""
        self.is_paused = True
        if mode == "abort":
            for row in (*self.running, *self.waiting):
                row.end(FinishReason.PAUSED)
            self._sweep()
        if clear_cache:
            self.reset_cache(preempt_running=True)
        self.flush()

    def resume(self) -> None:
        self.is_paused = False

    def reset_cache(self, *, preempt_running: bool) -> int:
        """Drops KV, that of running rows too where wanted, and returns how many blocks that freed."""
        tokens = self.prefixes.clear()
        if preempt_running:
            tokens += sum(row.kv_len for row in self.running)
            self._forget_running()
        return -(-tokens // BLOCK_TOKENS)

    def load_weights(self, tensors: Iterable[tuple[TensorLayout, memoryview]]) -> None:
        """Running rows keep the KV that they have; kept prefixes are of no use any more."""
        self.prefixes.clear()
        self.model.load(tensors)

    def load_adapter(self, adapter: Adapter, tensors: Iterable[tuple[TensorLayout, memoryview]]) -> None:
        """From now on requests of its policy use it."""
        self.adapters.load(adapter, tensors)

    def load(self) -> EngineLoad:
        """Counts that may be a step old when another thread asks."""
        running = list(self.running)
        used = len(running) * max((len(row.ids) for row in running), default=0)
        return EngineLoad(len(running), len(self.waiting), min(used / self._kv_tokens, 1.0), self.num_steps)

    def flush(self) -> None:
        """Hands over every token that was made."""
        for row in self.running:
            if isinstance(row, Sample):
                row.flush()

    def fail(self) -> list[Work]:
        """Forgets everything after an error inside a step and returns whose work that was."""
        works = list({id(row.work): row.work for row in (*self.running, *self.waiting)}.values())
        for work in works:
            for row in work.rows:
                row.ended = True
        self.running, self.waiting = [], []
        self.prefixes.clear()
        self.model.kv.clear()
        return works

    def step(self) -> None:
        """Admits what fits, reads what has to be read, and makes one token for every row that is ready."""
        self._admit()
        self._make_room()
        for call in list(self._calls()):
            if self._is_interrupted():
                break
            self._feed(call)
        self.num_steps += 1
        self._sweep()

    def _admit(self) -> None:
        """A request's other samples wait until its first one has read the prompt, and then share it."""
        left: list[Row] = []
        longest = max((len(row.ids) for row in self.running), default=0)
        for i, row in enumerate(self.waiting):
            longest_then = max(longest, len(row.ids))
            full = len(self.running) >= self.limits.max_rows
            if full or (self.running and not self._fits(len(self.running) + 1, longest_then + BLOCK_TOKENS)):
                left += self.waiting[i:]
                break
            if row is not row.work.rows[0] and not row.work.is_prompt_read:
                left.append(row)
                continue
            longest = longest_then
            self._place(row, longest)
        self.waiting = left

    def _fits(self, num_rows: int, longest: int) -> bool:
        return num_rows * rounded(longest) <= self._kv_tokens

    def _place(self, row: Row, longest: int) -> None:
        slot, kv = len(self.running), self.model.kv
        self.running.append(row)
        slots = min(1 << slot.bit_length(), self.limits.max_rows)
        kv.fit(slots if self._fits(slots, longest) else slot + 1, longest)
        kv.wipe(slot)
        row.kv_len = self._shared(row, slot)
        if row.cached is None:
            row.cached = row.kv_len

    def _shared(self, row: Row, slot: int) -> int:
        """Copies KV that is there already into the slot, and returns of how many tokens."""
        most = min(row.feed_to - 1, row.read_from - 1 if row.reads else row.feed_to)
        first = row.work.rows[0]
        if first is not row and first in self.running[:slot] and isinstance(first, Sample):
            shared = min(most, len(first.prompt), first.kv_len)
            self.model.kv.move(self.running.index(first), slot, shared)
            return shared
        found = self.prefixes.find(row.salt, np.array(row.ids, np.int32)) if most > 0 else None
        if found is None:
            return 0
        prefix, length = found
        self.model.kv.put(slot, prefix.copies, min(length, most))
        return min(length, most)

    def _make_room(self) -> None:
        """The rows that came last give up their slots where the others have grown too long."""
        while len(self.running) > 1 and not self._fits(len(self.running), max(len(r.ids) for r in self.running)):
            last = max(self.running, key=lambda r: r.order)
            last.forget_kv()
            last.num_preemptions += 1
            self._leave({id(last)})
            bisect.insort(self.waiting, last, key=lambda r: r.order)
        longest, kv = max((len(row.ids) for row in self.running), default=0), self.model.kv
        if longest > kv.width and not self._fits(kv.num_slots, longest):
            kv.shrink(len(self.running), kv.width)

    def _calls(self) -> Iterator[_Call]:
        """The model calls of one step. Rows share one where they are of one policy, about equally long, and all or none
        of them in need of every logit."""
        most_read = max(1, min(self.limits.step_tokens, LOGITS_AT_ONCE // self.model.identity.vocab_size))
        kinds: dict[tuple[str, bool, bool], list[int]] = {}
        for slot, row in enumerate(self.running):
            kind = (row.policy_id, row.reads_within(most_read), row.pending == 1)
            kinds.setdefault(kind, []).append(slot)
        for (_, reads, _), slots in kinds.items():
            most, group = most_read if reads else self.limits.step_tokens, list[int]()
            sizes = {slot: self.running[slot].next_ids(most, reads=reads) for slot in slots}
            for slot in sorted(slots, key=lambda s: (sizes[s], s)):
                if group and (len(group) + 1) * sizes[slot] > most:
                    yield _Call(group, [sizes[s] for s in group], reads)
                    group = []
                group.append(slot)
            yield _Call(group, [sizes[s] for s in group], reads)

    def _feed(self, call: _Call) -> None:
        rows = [self.running[slot] for slot in call.slots]
        fed = [
            Fed(slot, row.kv_len, row.ids[row.kv_len : row.kv_len + count])
            for slot, row, count in zip(call.slots, rows, call.counts, strict=True)
        ]
        with self.adapters.used(rows[0].policy_id):
            logits_RQV = self.model.feed(fed, every_logit=call.reads)
        for i, (row, count) in enumerate(zip(rows, call.counts, strict=True)):
            if call.reads:
                self._read(row, logits_RQV[i, -count:])
            row.kv_len += count
        drawing = [i for i, row in enumerate(rows) if isinstance(row, Sample) and not row.pending]
        if drawing:
            self._draw(logits_RQV[drawing, -1], [row for row in rows if isinstance(row, Sample) and not row.pending])

    def _read(self, row: Row, logits_QV: torch.Tensor) -> None:
        """Logits of position p are of token p + 1."""
        start, end = row.read_from, min(row.read_to, row.kv_len + len(logits_QV) + 1)
        if end <= start:
            return
        wanted = logits_QV[start - 1 - row.kv_len : end - 1 - row.kv_len]
        logprobs_NV = torch.log_softmax(wanted / row.scale, dim=-1)
        ids = torch.tensor(row.ids[start:end], device=wanted.device)
        picked = logprobs_NV.gather(1, ids[:, None])[:, 0].cpu().numpy()
        row.take_read(picked, [top(logprobs_V, row.top) for logprobs_V in logprobs_NV] if row.top else [])

    def _draw(self, logits_RV: torch.Tensor, rows: list[Sample]) -> None:
        seeds = np.array([row.seed for row in rows], np.uint64)
        u_R = uniforms(seeds, np.array([len(row.output) for row in rows], np.int64))
        eos = self.model.identity.eos_token_ids
        draws = draw(logits_RV, [row.asked(u, eos) for row, u in zip(rows, u_R.tolist(), strict=True)])
        for row, token, logprob, beside in zip(rows, draws.token_ids, draws.logprobs, draws.tops, strict=True):
            row.say_prompt_is_read()
            row.append(token, logprob, beside, eos)

    def _forget_running(self) -> None:
        for row in (*self.running, *self.waiting):
            row.forget_kv()

    def _sweep(self) -> None:
        """Forgets ended rows; their KV may serve a longer prompt."""
        self.waiting = [row for row in self.waiting if not row.ended]
        ended = {id(row) for row in self.running if row.ended}
        if not ended:
            return
        for slot, row in enumerate(self.running):
            if row.ended and self.prefixes.wants(row.kv_len):
                ids = np.array(row.ids[: row.kv_len], np.int32)
                self.prefixes.add(row.salt, Prefix(ids, self.model.kv.take(slot, row.kv_len)))
        self._leave(ended)
        self._give_back()

    def _leave(self, leaving: set[int]) -> None:
        """Frees slots: the last rows move into the holes."""
        holes = [slot for slot, row in enumerate(self.running) if id(row) in leaving]
        for hole in reversed(holes):
            last = self.running.pop()
            if hole < len(self.running):
                self.model.kv.move(len(self.running), hole, last.kv_len)
                self.running[hole] = last

    def _give_back(self) -> None:
        longest = max((len(row.ids) for row in self.running), default=0)
        needed = len(self.running) * rounded(longest)
        kv, floor = self.model.kv, min(self._kv_tokens, self.limits.max_rows * BLOCK_TOKENS)
        if not self.running and kv.capacity_tokens > floor:
            kv.clear()
        elif self.running and kv.capacity_tokens > max(SHRINK_ABOVE * needed, floor):
            kv.shrink(len(self.running), longest)
