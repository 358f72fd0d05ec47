"""Which adapters a model takes, and what is said about the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from skyrl_arctic_inference.engine.adapters import AdapterBook, adapter_sizes
from skyrl_rollout.errors import UnknownPolicy
from skyrl_rollout.server.engine import Adapter
from skyrl_rollout.weights.manifest import TensorLayout

Q = "model.layers.0.self_attn.q_proj"
ADAPTER = Adapter("p", 1, rank=4, alpha=8.0, target_modules=("q_proj",))


def half(side: str, shape: tuple[int, ...], *, module: str = Q, dtype: str = "f32") -> TensorLayout:
    return TensorLayout(f"base_model.model.{module}.lora_{side}.weight", dtype, shape)


PAIR = [half("A", (4, 16)), half("B", (32, 4))]


@pytest.fixture
def book() -> AdapterBook:
    tensors = [TensorLayout(f"{Q}.weight", "f32", (32, 16)), TensorLayout("model.norm.weight", "f32", (16,))]
    sizes = adapter_sizes([Q, "model.norm", "model.other"], tensors)
    assert sizes == {Q: (32, 16)}
    return AdapterBook(sizes, max_adapters=1, max_rank=8, dtype="f32")


def test_an_adapter_that_fits_is_taken_whether_or_not_it_names_its_targets(book):
    for targets in (("q_proj",), (Q,), ()):
        book.check(replace(ADAPTER, target_modules=targets), PAIR)


@pytest.mark.parametrize(
    ("adapter", "tensors", "said"),
    [
        (replace(ADAPTER, rank=9), PAIR, "rank is 9, this server takes 1 to 8"),
        (replace(ADAPTER, rank=0), PAIR, "rank is 0"),
        (replace(ADAPTER, alpha=float("nan")), PAIR, "alpha is nan"),
        (ADAPTER, [half("A", (4, 15)), PAIR[1]], r"\(4, 15\), expected f32 \(4, 16\)"),
        (ADAPTER, [PAIR[0], half("B", (32, 8))], r"\(32, 8\), expected f32 \(32, 4\)"),
        (ADAPTER, [half("A", (4, 16), dtype="bf16"), PAIR[1]], "bf16"),
        (ADAPTER, PAIR[:1], f"lora_A or lora_B is missing for {Q}"),
        (ADAPTER, [], "missing for every module"),
        (ADAPTER, [half("A", (4, 16), module="lm_head"), *PAIR], "lm_head.* belongs to no linear layer"),
        (ADAPTER, [TensorLayout(f"{Q}.weight", "f32", (4, 16)), *PAIR], "belongs to no linear layer"),
        (replace(ADAPTER, target_modules=("q_proj", "v_proj")), PAIR, "names v_proj, for which there is no tensor"),
    ],
)
def test_what_the_model_cannot_take_is_named(book, adapter, tensors, said):
    with pytest.raises(ValueError, match=said):
        book.check(adapter, tensors)


def test_one_adapter_too_many_is_refused_and_another_version_of_a_loaded_one_is_not(book):
    number = book.number("p")
    book.check(replace(ADAPTER, version=2), PAIR)
    with pytest.raises(ValueError, match=r"1 adapters are loaded \(p\), the limit is 1"):
        book.check(replace(ADAPTER, policy_id="q"), PAIR)
    assert book.number("p") == book.loaded("p") == number
    assert book.forget("p") == number and book.forget("p") is None
    assert book.number("p") != number  # what vLLM may still remember of the old one is not found


def test_an_unknown_policy_has_no_number(book):
    with pytest.raises(UnknownPolicy, match="publish its adapter first"):
        book.loaded("p")
