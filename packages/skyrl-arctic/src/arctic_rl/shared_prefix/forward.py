"""Logprobs and entropy of every response token of a batch, each prompt computed once."""

from __future__ import annotations

from typing import Any

import torch
from skyrl.train.policy.batch import TrajectoryBatch

from arctic_rl.shared_prefix.attention import NAME, install, without_mask
from arctic_rl.shared_prefix.coverage import require_covered
from arctic_rl.shared_prefix.layout import Packed, pack
from arctic_rl.shared_prefix.logits import chunked_logprobs, plain_head

DEFAULT_BUDGET_BYTES = 2**28


def prepare(model: Any) -> None:
    """Readies a causal LM of transformers once, before anything wraps it. ValueError names a layer that is not covered;
    afterwards the model still takes ordinary rows."""
    require_covered(model)
    install(model)


def token_logprobs(
    model: Any,
    batch: TrajectoryBatch,
    *,
    temperature: float,
    with_entropy: bool,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logprobs_T, entropy_T or None) in the batch's order, as `PolicyBackend.token_logprobs` gives them; gradients
    flow where they are enabled. `model` is prepared, and may be wrapped by PEFT. `budget_bytes` bounds the LM head's
    tiles.
    """
    packed = pack(batch)
    hidden_ND = hidden_states(model, packed)
    return chunked_logprobs(
        hidden_ND[packed.predictors_T],
        plain_head(model.get_output_embeddings()),
        packed.labels_T,
        temperature=temperature,
        with_entropy=with_entropy,
        budget_bytes=budget_bytes,
    )


def hidden_states(model: Any, packed: Packed) -> torch.Tensor:
    """[N, D]: what the decoder gives the LM head, for each place of the row."""
    with without_mask():
        output = model.get_decoder()(
            input_ids=packed.input_ids_1N,
            position_ids=packed.position_ids_1N,
            attention_mask=None,
            use_cache=False,
            **{NAME: packed.layout},
        )
    hidden: torch.Tensor = output.last_hidden_state.squeeze(0)
    return hidden
