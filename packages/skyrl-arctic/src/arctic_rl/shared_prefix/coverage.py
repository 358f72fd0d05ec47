"""Which models may be trained on packed rows; every other is refused with the layer that is in the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COVERED = {
    "llama": "LlamaAttention",
    "mistral": "MistralAttention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
    "qwen3_moe": "Qwen3MoeAttention",
}
"""model_type -> the class of its attention layers."""

STRETCHED_BY_LENGTH = ("dynamic", "longrope")


def uncovered(model: Any) -> str | None:
    """Why the model cannot be trained on packed rows, beginning with the layer's name; None where it can."""
    return next(_obstacles(model), None)


def require_covered(model: Any) -> None:
    """ValueError where `uncovered` has something to say."""
    if (reason := uncovered(model)) is not None:
        raise ValueError(f"prompts cannot be shared in this model: {reason}; set trainer.arctic_rl.use_zorro=false")


def _obstacles(model: Any) -> Iterator[str]:
    config = model.config
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind != "full_attention":
            yield f"layers.{index} is of type {kind}, only full_attention is covered"
    for name, module in model.named_modules():
        if getattr(module, "sliding_window", None) is not None and hasattr(module, "layer_idx"):
            yield f"{name} looks back {module.sliding_window} tokens only (sliding window)"
        if float(getattr(module, "attention_dropout", 0.0) or 0.0) > 0:
            yield f"{name} has attention dropout {module.attention_dropout}"
    if getattr(config, "sliding_window", None) is not None and getattr(config, "layer_types", None) is None:
        yield f"layers.0.self_attn looks back {config.sliding_window} tokens only (sliding window)"
    layers = [(name, m) for name, m in model.named_modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")]
    wanted = COVERED.get(config.model_type)
    for name, module in layers:
        if type(module).__name__ != wanted:
            yield f"{name} is {type(module).__name__} of a {config.model_type} model; covered are {', '.join(COVERED)}"
    if not layers or wanted is None:
        yield f"the model is of type {config.model_type}; covered are {', '.join(COVERED)}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in STRETCHED_BY_LENGTH:
        yield f"rotary_emb is of type {rope['rope_type']}, which depends on the longest row of a batch"
