"""Are logprobs and entropy, tile by tile, those of the full logits, with no tensor of their size?"""

from __future__ import annotations

import pytest
import torch
from arctic_rl.shared_prefix import forward
from arctic_rl.shared_prefix.logits import chunked_logprobs, num_tiles, tile_size
from shared_prefix.tiny import batch_of, model_of
from skyrl.train.algorithms.logprobs import token_logprobs

T, D, V = 13, 8, 31


def through(budget: int | None, *, bias: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs and gradients by tiles within the budget, or from the full logits."""
    torch.manual_seed(0)
    head = torch.nn.Linear(D, V, bias=bias).to(dtype)
    hidden = torch.randn(T, D, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, V, (T,))
    if budget is None:
        found = token_logprobs(head(hidden), labels, temperature=0.6, with_entropy=True)
    else:
        found = chunked_logprobs(hidden, head, labels, temperature=0.6, with_entropy=True, budget_bytes=budget)
    assert found[1] is not None
    weights = torch.linspace(-1, 1, T).to(found[0].dtype)
    loss = (found[0] * weights).sum() + (found[1] * weights.square()).sum()
    return [*found, *torch.autograd.grad(loss, [hidden, *head.parameters()])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("budget", [1, 3000, 10**6])
def test_tiles_are_the_full_logits(budget: int, bias: bool) -> None:
    for dtype, off in ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        for full, tiled in zip(
            through(None, bias=bias, dtype=dtype), through(budget, bias=bias, dtype=dtype), strict=True
        ):
            assert full.dtype == tiled.dtype and torch.allclose(full, tiled, rtol=0, atol=off)


def test_no_tensor_is_larger_than_the_budget() -> None:
    positions, vocabulary, budget = 512, 2000, 2**18
    head, hidden = torch.nn.Linear(4, vocabulary, bias=False), torch.randn(positions, 4, requires_grad=True)
    labels = torch.zeros(positions, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as seen:
        found = chunked_logprobs(hidden, head, labels, temperature=1.0, with_entropy=True, budget_bytes=budget)
        (found[0].sum() + found[1].sum()).backward()  # type: ignore[union-attr]
    largest = max(e.nbytes() for e in seen.profiler.kineto_results.events())
    assert 0 < largest <= budget < 4 * positions * vocabulary


def test_tiles_from_a_budget_by_hand() -> None:
    assert tile_size(1000, 3 * 1000 * 4 * 7) == 7
    assert tile_size(1000, 5) == 1
    assert num_tiles(20, 1000, 3 * 1000 * 4 * 7) == 3
    assert num_tiles(0, 1000, 10**9) == 1


def test_what_a_head_must_not_be() -> None:
    model, batch = model_of("qwen3"), batch_of([(0, 3, 2)])
    forward.prepare(model)
    with pytest.raises(ValueError, match="temperature 0 has no logprobs"):
        forward.token_logprobs(model, batch, temperature=0, with_entropy=False)
    assert forward.token_logprobs(model, batch, temperature=1.0, with_entropy=False)[1] is None
    model.set_output_embeddings(torch.nn.Sequential(model.lm_head))
    with pytest.raises(ValueError, match="is Sequential.*plain torch.nn.Linear"):
        forward.token_logprobs(model, batch, temperature=1.0, with_entropy=False)
