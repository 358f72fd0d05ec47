"""Deltas of one sample: coalesced, cut at commits, unknown logprobs counted."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from skyrl_rollout.server.samples import SampleStream
from skyrl_rollout.tokens import FinishReason, VersionSpan


def tokens(n: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(start, start + n, dtype=np.int32), np.full(n, -1.0, np.float32)


def test_unknown_logprobs_are_kept_in_place_and_counted() -> None:
    sample = SampleStream(0, 3)
    sample.add(np.array([1, 2, 3]), np.array([-1.0, np.nan, -2.0]))
    (delta,) = sample.take()
    logprobs = np.frombuffer(delta.logprobs, "<f4")
    assert np.isnan(logprobs).tolist() == [False, True, False]
    assert sample.finish(FinishReason.EOS, None, 0).invalid_logprobs == 1


def test_as_many_logprobs_as_tokens_are_demanded() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1 logprobs"):
        SampleStream(0, 0).add(np.array([1, 2]), np.array([0.0]))


def test_tokens_beyond_the_limit_of_a_commit_are_dropped() -> None:
    sample = SampleStream(0, 1)
    sample.add(*tokens(5))
    sample.stop_at(7)
    sample.add(*tokens(5, 5))
    sample.add(*tokens(5, 10))
    assert sample.num_tokens == 7
    assert sample.finish(FinishReason.VERSION_CHANGED, None, 0).spans == (VersionSpan(0, 7, 1, 1),)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=4),
    st.integers(0, 3),
)
def test_no_delta_straddles_a_cut_and_none_is_lost(
    chunks: list[int], cuts: list[tuple[int, bool]], taken_every: int
) -> None:
    """Chunks arrive late: every cut is known before the tokens after it."""
    sample, total = SampleStream(2, 0), sum(chunks)
    for version, (at, retain) in enumerate(sorted(cuts), 1):
        sample.cut(min(at, total), version, retain_kv=retain)
    deltas, made = [], 0
    for i, n in enumerate(chunks):
        waiting = sample.add(*tokens(n, made))
        made += n
        assert waiting >= n
        if taken_every and i % taken_every == 0:
            deltas += sample.take()
    deltas += sample.take()
    ended = sample.finish(FinishReason.LENGTH, None, 0)
    ids = b"".join(d.token_ids for d in deltas)
    assert np.frombuffer(ids, "<i4").tolist() == list(range(total))
    assert ended.token_digest == xxhash.xxh3_128_digest(ids)
    offset = 0
    for d in deltas:
        assert d.offset == offset
        offset += len(d.token_ids) // 4
        span = next(s for s in ended.spans if s.start <= d.offset < s.start + s.length)
        assert offset <= span.start + span.length
        assert (d.weight_version, d.oldest_kv_version) == (span.weight_version, span.oldest_kv_version)
