"""The arena: tensors land where the manifest says, with the digest of what really lies there."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from skyrl_rollout.weights.arena import Arena
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, content_digest

layouts = st.lists(
    st.tuples(st.sampled_from(["f32", "bf16", "i8"]), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6
)


def bytes_of(layout: TensorLayout, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(layout.nbytes)


@settings(max_examples=30, deadline=None)
@given(layouts, st.booleans(), st.randoms(use_true_random=False))
def test_every_tensor_lies_at_its_offset_with_its_digest_in_whatever_order_they_come(shapes, shared, order):
    layout = [TensorLayout(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(shapes)]
    arena = Arena(layout, shared=shared, shard_bytes=40)
    try:
        for seed in (1, 2):  # the second round writes over the first
            data = {t.name: bytes_of(t, seed + i) for i, t in enumerate(layout)}
            arena.begin()
            for t in order.sample(layout, len(layout)):
                arena.write(t.name, memoryview(data[t.name]))
            for spec in arena.specs():
                where = bytes(arena.view(spec))
                assert where == data[spec.layout.name]
                assert spec.content_digest == content_digest(where) and spec.offset % 64 == 0
            for shard, nbytes in arena.shard_nbytes.items():
                chunks = list(arena.chunks(shard, 0, 7))
                assert b"".join(bytes(c) for _, c in chunks) == bytes(arena.buffers[shard])
                assert [o for o, _ in chunks] == list(range(0, nbytes, 7))
            assert Manifest(1, arena.specs()).shard_nbytes() == arena.shard_nbytes
            largest = max(t.nbytes for t in layout)
            assert all(n <= 64 + largest for n in arena.shard_nbytes.values())  # the last one begins before 40, aligned
    finally:
        arena.close()


def test_a_large_tensor_of_any_format_is_digested_in_blocks_like_in_one_piece():
    weights = np.random.default_rng(0).standard_normal((700, 1000), np.float32)
    arena = Arena([TensorLayout("w", "f32", weights.shape)], shared=False)
    arena.write("w", memoryview(weights))
    assert arena.specs()[0].content_digest == xxhash.xxh3_128_digest(weights.tobytes())
    arena.close()


def test_tensors_that_are_not_those_of_the_layout_are_named():
    arena = Arena([TensorLayout("a", "f32", (2, 2)), TensorLayout("b", "f32", (1,))], shared=False)
    with pytest.raises(ValueError, match="tensor c is not in the layout of 2 tensors"):
        arena.write("c", memoryview(b""))
    with pytest.raises(ValueError, match=r"tensor a: 8 bytes came, its layout \[2, 2\] of f32 is 16"):
        arena.write("a", memoryview(bytes(8)))
    with pytest.raises(ValueError, match="tensor a: its bytes are not contiguous"):
        arena.write("a", memoryview(np.zeros((2, 4), np.float32)[:, ::2]))
    arena.write("a", memoryview(bytes(16)))
    with pytest.raises(ValueError, match="tensor a came twice"):
        arena.write("a", memoryview(bytes(16)))
    with pytest.raises(ValueError, match="1 of 2 tensors never came: b"):
        arena.specs()
    with pytest.raises(ValueError, match="names a tensor twice"):
        Arena([TensorLayout("a", "f32", (1,))] * 2, shared=False)
    arena.close()
