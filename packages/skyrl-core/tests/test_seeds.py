"""Whether derived seeds are stable, distinct and in range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skyrl.train.seeds import derive

PARTS = st.lists(st.one_of(st.integers(), st.text(max_size=12)), max_size=5)


def test_a_seed_is_the_same_on_every_machine_and_in_every_version():
    assert derive(42, 7, "train", "3", 1) == 67813168367458824


@given(st.integers(), PARTS)
def test_a_seed_has_63_bits(run_seed, parts):
    assert 0 <= derive(run_seed, *parts) < 2**63


@given(st.integers(), PARTS, PARTS)
def test_other_parts_give_another_seed(run_seed, one, other):
    assert (derive(run_seed, *one) == derive(run_seed, *other)) == (one == other)


def test_a_number_and_its_text_are_different_parts():
    assert len({derive(0, "1", 2), derive(0, 1, "2"), derive(0, "12"), derive(0, "1", "2")}) == 4


@pytest.mark.parametrize("part", [1.0, True, None, b"x"])
def test_a_part_that_could_be_written_in_two_ways_is_refused(part):
    with pytest.raises(TypeError, match="int and str"):
        derive(0, part)
