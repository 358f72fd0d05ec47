"""Is what sharing a prompt costs counted as by hand, and is work cut and shared out by that cost?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from arctic_rl.shared_prefix.cost import (
    Shape,
    balanced,
    even,
    micro_batches,
    pair_cost,
    part_cost,
    pays,
    predicted_speedup,
)
from hypothesis import given, settings
from hypothesis import strategies as st

QWEN3_06B = SimpleNamespace(
    hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072
)
SHAPES = st.lists(
    st.builds(Shape, st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)), max_size=8
)


def even_group(prompt_len: int, response_len: int, count: int) -> Shape:
    return Shape(prompt_len, (response_len,) * count)


def test_tokens_and_pairs_by_hand() -> None:
    shape = Shape(10, (2, 4))
    assert (shape.tokens_apart, shape.tokens_shared) == (12 + 14, 10 + 6)
    assert (shape.pairs_apart, shape.pairs_shared) == ((144 + 196) / 2, 50 + 20 + 2 + 40 + 8)
    assert shape.cost_apart(0.1) == pytest.approx(26 + 17.0)
    assert shape.cost_shared(0.1) == pytest.approx(16 + 12.0)


def test_the_cost_of_a_pair_by_hand() -> None:
    # 4 * 16 * 128 over 2 * (q and o: 2 * 1024 * 2048, k and v: 2 * 1024 * 1024, MLP: 3 * 1024 * 3072)
    assert pair_cost(QWEN3_06B) == pytest.approx(8192 / 31_457_280)
    moe = SimpleNamespace(
        **vars(QWEN3_06B) | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    )
    assert pair_cost(moe) == pytest.approx(8192 / (2 * (6_291_456 + 3 * 1024 * 512 * 2 + 1024 * 8)))


@pytest.mark.parametrize(
    ("lengths", "speedup"), [((512, 32, 8), 5.44), ((512, 128, 8), 3.08), ((256, 256, 8), 1.69), ((128, 256, 4), 1.30)]
)
def test_the_predicted_speedup_of_the_documented_cases(lengths: tuple[int, int, int], speedup: float) -> None:
    config = SimpleNamespace(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=768)
    assert predicted_speedup([even_group(*lengths)], pair_cost(config)) == pytest.approx(speedup, abs=0.02)


def test_it_pays_above_one_and_fifteen_hundredths() -> None:
    assert pays([even_group(512, 32, 8)], 1e-3)
    assert not pays([even_group(32, 2048, 8)], 1e-4)
    assert not pays([even_group(512, 32, 1)], 1e-3)
    assert predicted_speedup([], 1e-3) == 1.0
    # (100 + r) * 2 / (100 + 2 r) without attention: 1.15 at r = 283.3
    assert pays([even_group(100, 283, 2)], 0.0) and not pays([even_group(100, 284, 2)], 0.0)


def test_a_response_above_the_budget_names_the_key() -> None:
    with pytest.raises(
        ValueError, match=r"a prompt of 50 tokens with a response of 30 .* 70: raise trainer\.max_tokens"
    ):
        micro_batches([Shape(50, (10, 30))], 70, 0.0)


def test_a_group_above_the_budget_is_split_and_pays_its_prompt_again() -> None:
    shapes = [Shape(10, (5, 5, 5)), Shape(4, (1,))]
    cut = micro_batches(shapes, 20, 0.0)
    assert [[(p.group, p.members) for p in micro] for micro in cut] == [[(0, (0, 1))], [(0, (2,)), (1, (0,))]]
    assert [sum(part_cost(shapes, p, 0.0) for p in micro) for micro in cut] == [20, 20]


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.floats(0, 1e-2), st.integers(0, 300))
def test_micro_batches_hold_every_response_once_within_the_budget(shapes: list[Shape], k: float, spare: int) -> None:
    dearest = max((Shape(s.prompt_len, (r,)).cost_shared(k) for s in shapes for r in s.response_lens), default=1.0)
    cut = micro_batches(shapes, dearest + spare, k)
    seen = [(part.group, member) for micro in cut for part in micro for member in part.members]
    assert sorted(seen) == [(g, m) for g, s in enumerate(shapes) for m in range(len(s.response_lens))]
    for micro in cut:
        assert sum(part_cost(shapes, part, k) for part in micro) <= (dearest + spare) * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 100), max_size=30), st.integers(1, 6))
def test_ranks_are_balanced_and_even(costs: list[float], num_ranks: int) -> None:
    ranks = balanced(costs, num_ranks)
    assert sorted(i for own in ranks for i in own) == list(range(len(costs)))
    loads = [sum(costs[i] for i in own) for own in ranks]
    # largest first is within 4/3 of the best (Graham 1969), which is at least the mean and the dearest
    assert max(loads) - min(loads) <= max(costs, default=0.0) + 1e-9
    padded = even(ranks)
    assert len({len(own) for own in padded}) == 1
    assert [[i for i in own if i is not None] for own in padded] == ranks


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.floats(0, 1e-2))
def test_sharing_never_costs_more(shapes: list[Shape], k: float) -> None:
    assert predicted_speedup(shapes, k) >= 1 - 1e-12
