"""Deltas of one sample: coalesced, cut at commits, unknown logprobs counted."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from skyrl_rollout.server.samples import SampleStream
from skyrl_rollout.tokens import FinishReason, TopK, VersionSpan

MIB = 1 << 20


def tokens(n: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(start, start + n, dtype=np.int32), np.full(n, -1.0, np.float32)


def test_unknown_logprobs_are_kept_in_place_and_counted() -> None:
    sample = SampleStream(0, 3)
    sample.add(np.array([1, 2, 3]), np.array([-1.0, np.nan, -2.0]))
    (delta,) = sample.take(MIB)
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
            deltas += sample.take(MIB)
    deltas += sample.take(MIB)
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 40), st.integers(1, 300))
def test_what_travels_beside_the_tokens_is_cut_with_them_and_no_delta_exceeds_the_limit(
    chunks: list[int], cut_at: int, max_bytes: int
) -> None:
    sample, made = SampleStream(0, 0), 0
    sample.cut(min(cut_at, sum(chunks)), 1, retain_kv=False)
    for n in chunks:
        rows = np.arange(made, made + n, dtype=np.int32)
        top = TopK(np.stack([rows, rows + 1], axis=1), np.zeros((n, 2), np.float32))
        sample.add(*tokens(n, made), top, {"experts": rows.astype(np.int16).reshape(n, 1)})
        made += n
    deltas = sample.take(max_bytes)
    for d in deltas:
        ids = np.frombuffer(d.token_ids, "<i4")
        assert d.top is not None
        assert d.top.token_ids.tolist() == [[i, i + 1] for i in ids]
        assert d.extras["experts"].tolist() == [[i] for i in ids]
        assert d.nbytes <= max_bytes or len(ids) == 1
    assert sum(len(d.token_ids) // 4 for d in deltas) == made


def test_rows_beside_the_tokens_must_be_as_many_as_tokens() -> None:
    top = TopK(np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="2 tokens with 1 rows of top ids"):
        SampleStream(0, 0).add(*tokens(2), top)
    with pytest.raises(ValueError, match="2 tokens with 3 rows of routed_experts"):
        SampleStream(0, 0).add(*tokens(2), None, {"routed_experts": np.zeros((3, 2), np.int16)})


def test_rows_beyond_the_limit_of_a_commit_are_dropped_with_their_tokens() -> None:
    sample = SampleStream(0, 1)
    sample.stop_at(3)
    for start in (0, 2, 4):
        sample.add(*tokens(2, start), None, {"x": np.arange(start, start + 2)})
    (delta,) = sample.take(MIB)
    assert delta.extras["x"].tolist() == [0, 1, 2]


def test_rows_of_candidates_are_as_long_as_the_longest() -> None:
    sample = SampleStream(0, 1)
    sample.add(*tokens(1), None, {"top_p_token_ids": np.array([[5, 6, 7]], np.int32)})
    sample.add(*tokens(1, 1), None, {"top_p_token_ids": np.array([[8]], np.int32)})
    (delta,) = sample.take(MIB)
    assert delta.extras["top_p_token_ids"].tolist() == [[5, 6, 7], [8, -1, -1]]
