"""Is every model that packed rows would be wrong for refused, with the layer that is in the way?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arctic_rl.shared_prefix import forward
from arctic_rl.shared_prefix.attention import attend
from arctic_rl.shared_prefix.coverage import require_covered, uncovered
from arctic_rl.shared_prefix.layout import Group, Layout
from shared_prefix.tiny import FAMILIES, SMALL, batch_of, model_of
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED: dict[str, tuple[Any, str]] = {
    "mistral, sliding window": (lambda: FAMILIES["mistral"](sliding_window=16), "layers.0.self_attn looks back 16"),
    "qwen2, some layers sliding": (
        lambda: FAMILIES["qwen2"](use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "layers.1 is of type sliding_attention",
    ),
    "attention dropout": (
        lambda: FAMILIES["llama"](attention_dropout=0.1),
        "model.layers.0.self_attn has attention dropout 0.1",
    ),
    "linear attention": (
        lambda: Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **SMALL,
                head_dim=8,
                layer_types=["linear_attention", "full_attention"],
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=8,
                shared_expert_intermediate_size=8,
            )
        ),
        "layers.0 is of type linear_attention",
    ),
    "another family": (lambda: Phi3ForCausalLM(Phi3Config(**SMALL, pad_token_id=0, sliding_window=None)), "phi3"),
    "an older family": (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)), "gpt2"),
    "frequencies by length": (lambda: FAMILIES["llama"](rope_parameters=ROPE), "rotary_emb is of type dynamic"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_not_covered_is_refused_by_the_layers_name(case: str) -> None:
    build, reason = REFUSED[case]
    model = build()
    with pytest.raises(ValueError, match=r"prompts cannot be shared .*use_zorro=false") as refusal:
        forward.prepare(model)
    assert reason in str(refusal.value)
    assert model.config._attn_implementation != "shared_prefix"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_covered_families_are(family: str) -> None:
    model = model_of(family)
    require_covered(model)
    assert uncovered(model) is None


def test_a_mask_beside_the_layout_is_refused() -> None:
    model, layout = model_of("qwen3"), Layout((Group(0, 2, (1, 1)),))
    module, rows = model.model.layers[0].self_attn, torch.zeros(1, 4, 4, 8)
    for wrong, what in (
        ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, "an attention mask"),
        ({"attention_mask": None, "dropout": 0.1}, "attention dropout"),
        ({"attention_mask": None, "sliding_window": 4}, "a sliding window"),
    ):
        with pytest.raises(ValueError, match=what):
            attend(module, rows, rows, rows, shared_prefix=layout, **wrong)
    with pytest.raises(ValueError, match=r"the layout is of \[1, 4\] tokens, the row is \[2, 4\]"):
        attend(module, *(rows.expand(2, -1, -1, -1),) * 3, None, shared_prefix=layout)


def test_an_empty_prompt_is_refused() -> None:
    model = model_of("qwen3")
    forward.prepare(model)
    with pytest.raises(ValueError, match="an empty prompt"):
        forward.token_logprobs(model, batch_of([(0, 0, 3)]), temperature=1.0, with_entropy=False)
