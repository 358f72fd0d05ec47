"""How batches are cut over ranks and micro-batches, and rows laid out for a model."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st
from skyrl.train.policy.fsdp.rows import to_rows
from skyrl.train.policy.sharding import MicroLimits, balance, micro_batches, num_micro_batches

LENS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def test_ranks_get_whole_sequences_with_even_token_counts():
    assert balance(torch.tensor([10, 1, 9, 2]), 2) == [[0, 1], [2, 3]]


def test_a_rank_may_be_left_without_sequences():
    assert balance(torch.tensor([4]), 3) == [[0], [], []]


@given(lens=LENS, ranks=st.integers(1, 5))
def test_every_sequence_goes_to_one_rank_and_no_rank_is_ahead_by_more_than_the_longest(lens, ranks):
    shards = balance(torch.tensor(lens), ranks)
    assert sorted(s for shard in shards for s in shard) == list(range(len(lens)))
    loads = [sum(lens[s] for s in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(lens)


@given(lens=LENS, most=st.integers(1, 8), tokens=st.integers(1, 120))
def test_micro_batches_keep_to_their_limit(lens, most, tokens):
    by_count = micro_batches(torch.tensor(lens), MicroLimits(most))
    assert all(len(m) <= most for m in by_count)
    by_tokens = micro_batches(torch.tensor(lens), MicroLimits(most, tokens))
    assert all(len(m) == 1 or len(m) * max(lens[s] for s in m) <= tokens for m in by_tokens)
    for cut in (by_count, by_tokens):
        assert sorted(s for m in cut for s in m) == list(range(len(lens)))


def test_every_rank_runs_as_many_micro_batches_as_the_busiest_one_needs():
    shards = [torch.tensor([5, 5, 5]), torch.tensor([], dtype=torch.int64)]
    assert num_micro_batches(shards, MicroLimits(2)) == 2
    assert num_micro_batches([torch.tensor([], dtype=torch.int64)], MicroLimits(2)) == 1


def test_rows_are_padded_on_the_right_and_know_which_position_predicts_each_token():
    # tokens 0 1 | 2 3 4 and 5 6 | 7, prompts of two
    rows = to_rows(batch_of([[0, 0, 0], [0]], groups=[0, 1]))
    assert rows.input_ids_BL.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 0, 0]]
    assert rows.predictors_T.tolist() == [1, 2, 3, 6]
    assert rows.labels_T.tolist() == [2, 3, 4, 7]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        to_rows(batch_of([[0.0]], groups=[0], prompt_len=0))
