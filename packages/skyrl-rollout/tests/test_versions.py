"""Spans of weight versions: checked against a per-token list that is too simple to be wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skyrl_rollout.tokens import VersionSpan
from skyrl_rollout.versions import VersionLedger, versions_per_token

steps = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.booleans()), max_size=8)


@given(
    first=st.integers(0, 5),
    steps=steps,
    tail=st.integers(0, 9),
    offset=st.integers(0, 90),
    count=st.integers(0, 90),
)
def test_every_token_has_the_version_that_was_live_when_it_was_made(first, steps, tail, offset, count):
    ledger, plain, kv = VersionLedger(first), [], first
    for made, growth, retain in steps:
        plain += [(ledger.version, kv)] * made
        version = ledger.version + growth
        kv = kv if retain else version
        ledger.cut(len(plain), version, kv)
    plain += [(ledger.version, kv)] * tail
    assert [ledger.version_at(i) for i in range(len(plain))] == [v for v, _ in plain]
    spans = ledger.spans(len(plain))
    assert versions_per_token(spans, len(plain)).tolist() == [v for v, _ in plain]
    assert [s.oldest_kv_version for s in spans for _ in range(s.length)] == [k for _, k in plain]
    assert len(spans) == sum(1 for i, p in enumerate(plain) if i == 0 or p[0] != plain[i - 1][0])
    pieces = ledger.split(offset, count)
    assert [i for o, n, _, _ in pieces for i in range(o, o + n)] == list(range(offset, offset + count))
    assert all(n > 0 and ledger.version_at(o) == ledger.version_at(o + n - 1) == v for o, n, v, _ in pieces)


def test_a_delta_that_arrives_after_the_commit_is_split_where_the_engine_stood():
    ledger = VersionLedger(4)
    ledger.cut(10, 5, oldest_kv=4)
    assert ledger.split(6, 8) == [(6, 4, 4, 4), (10, 4, 5, 4)]


def test_a_commit_before_the_first_token_leaves_one_span():
    ledger = VersionLedger(0)
    ledger.cut(0, 1)
    ledger.cut(0, 2)
    assert ledger.spans(3) == (VersionSpan(0, 3, 2, 2),)
    assert ledger.spans(0) == ()


def test_cuts_that_go_back_are_refused():
    ledger = VersionLedger(1)
    ledger.cut(5, 2)
    with pytest.raises(ValueError, match="before the last cut at 5"):
        ledger.cut(4, 3)
    with pytest.raises(ValueError, match="versions only grow"):
        ledger.cut(6, 2)
    with pytest.raises(ValueError, match="is newer than the weight version"):
        ledger.cut(6, 3, oldest_kv=4)


@pytest.mark.parametrize("spans", [(), ((0, 2, 1, 1),), ((0, 2, 1, 1), (3, 1, 2, 2)), ((0, 4, 1, 1),)])
def test_spans_with_a_hole_or_an_overrun_are_an_error(spans):
    with pytest.raises(ValueError, match="span"):
        versions_per_token([VersionSpan(*s) for s in spans], 3)
    assert versions_per_token([VersionSpan(0, 3, 7, 7)], 3).dtype == np.int64
