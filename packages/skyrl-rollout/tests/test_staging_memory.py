"""Memory of an update that the next one takes over: reused where it fits, never while somebody looks at it."""

import sys

import pytest
from skyrl_rollout.errors import StagingFull
from skyrl_rollout.server.staging_memory import StagingMemory

SIZES = {0: 5000, 3: 70_000}


def test_the_next_update_of_these_sizes_gets_the_same_memory() -> None:
    memory = StagingMemory()
    first = memory.take(SIZES)
    first[3][0:4] = b"left"
    memory.give_back(first)
    again = memory.take({3: 70_000, 7: 5000, 8: 70_000})
    assert again[3] is first[3] and again[7] is first[0] and again[8] not in first.values()
    assert again[3][0:4] == b"left", "what is reused is not cleared: an update writes every byte before its seal"


def test_memory_that_somebody_looks_at_is_left_to_them() -> None:
    memory = StagingMemory()
    first = memory.take(SIZES)
    served = memoryview(first[3])[8:16]
    memory.give_back(first)
    again = memory.take(SIZES)
    again[3][:] = b"n" * len(again[3])
    assert again[0] is first[0] and again[3] is not first[3]
    assert bytes(served) == bytes(8)


def test_memory_of_other_sizes_is_given_up_before_more_is_taken() -> None:
    memory = StagingMemory()
    first = memory.take(SIZES)
    memory.give_back(first)
    other = memory.take({0: 6000})
    assert first[0].closed and first[3].closed and not other[0].closed
    memory.give_back(other)
    memory.give_back(memory.take({0: 9000}))
    assert other[0].closed, "only the last update's memory is kept"
    memory.give_back(last := memory.take({0: 9000}))
    memory.release()
    assert last[0].closed


def test_a_shard_without_bytes_has_its_block_and_too_much_is_refused() -> None:
    memory = StagingMemory()
    assert len(memory.take({0: 0})[0]) == 1
    with pytest.raises(StagingFull, match="needs .* MB to be staged and this machine, or the memory limit"):
        memory.take({0: sys.maxsize // 2})
