"""Does a packed row hold each prompt once, and does every response token find its predictor, label and position?"""

from __future__ import annotations

import torch
from arctic_rl.shared_prefix.layout import Group, groups_of, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_prefix.tiny import batch_of

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=8)


def test_a_row_by_hand() -> None:
    batch = batch_of([(7, 3, 2), (2, 2, 1), (7, 3, 3)])
    packed = pack(batch)
    assert packed.layout.groups == (Group(0, 3, (2, 3)), Group(8, 2, (1,)))
    assert packed.position_ids_1N[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]
    # p p p a a b b b | q q c: the prompt's last place predicts the first token of a and of b
    assert packed.predictors_T.tolist() == [2, 3, 9, 2, 5, 6]
    assert packed.segment_ids_T.tolist() == [0, 0, 1, 2, 2, 2]
    sequences = batch.token_ids_N.split(batch.seq_lens_S.tolist())
    row = [*sequences[0].tolist(), *sequences[2][3:].tolist(), *sequences[1].tolist()]
    assert packed.input_ids_1N[0].tolist() == row


def test_groups_are_told_by_their_id() -> None:
    equal = batch_of([(5, 4, 1), (3, 4, 1), (5, 4, 2), (3, 4, 2)], equal_prompts=True)
    assert groups_of(equal) == [[0, 2], [1, 3]]
    turns = batch_of([(5, 4, 1), (5, 6, 1), (5, 4, 2)])
    assert groups_of(turns) == [[0, 2], [1]]


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_every_token_is_where_it_is_looked_for(rows: list[tuple[int, int, int]]) -> None:
    batch = batch_of(rows)
    packed = pack(batch)
    row, positions = packed.input_ids_1N[0], packed.position_ids_1N[0]
    starts_S = torch.cumsum(batch.seq_lens_S, 0) - batch.seq_lens_S
    first_T = packed.segment_ids_T
    at_T = batch.prompt_lens_S[first_T] + batch.positions_T  # within the own sequence
    flat_T = starts_S[first_T] + at_T
    assert torch.equal(packed.labels_T, batch.token_ids_N[flat_T])
    assert torch.equal(row[packed.predictors_T], batch.token_ids_N[flat_T - 1])
    assert torch.equal(positions[packed.predictors_T], at_T - 1)
    prompts = {(group, prompt_len) for group, prompt_len, _ in rows}
    assert packed.layout.num_tokens == row.numel() == sum(p for _, p in prompts) + sum(r for *_, r in rows)
