"""About how much memory a worker and a server take, from the sizes in the model's own configuration.

Sums of the large tensors, no measurement: allocators, kernels and communication buffers come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.train.policy.roles import num_workers

GIB = 2**30
MASTER_BYTES = 4  # master weights and gradients are float32
MOMENTS_BYTES = 8  # AdamW keeps two float32 numbers a weight
# Values of hidden size that one token leaves in one layer where nothing is recomputed.
ACTIVATIONS_PER_LAYER = 16
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSize:
    """Counts of one model. kv_elements: numbers that one token keeps in the cache, over all layers."""

    num_params: int
    num_layers: int
    hidden: int
    vocabulary: int
    kv_elements: int


def model_size(path: str) -> ModelSize | None:
    """Of a Hugging Face checkpoint's folder, without loading a weight; None where there is no such folder here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return None
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSize(
        num_params=sum(p.numel() for p in model.parameters()),
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        kv_elements=2 * text.num_hidden_layers * heads * width,
    )


def sharded_state(cfg: Any, role: str, size: ModelSize) -> dict[str, float]:
    """Bytes of weights and optimizer in one worker of the fsdp backend: role is policy, critic or ref."""
    part = getattr(cfg.trainer, role)
    shards = num_workers(cfg, role) if part.fsdp_config.fsdp_size == -1 else part.fsdp_config.fsdp_size
    state = {"weights": size.num_params * MASTER_BYTES / shards}
    if role != "ref":
        state |= {
            "gradients": size.num_params * MASTER_BYTES / shards,
            "optimizer": size.num_params * MOMENTS_BYTES / shards,
        }
    return state


def activations(cfg: Any, size: ModelSize, *, compute_bytes: int, trained: bool) -> dict[str, float]:
    """Bytes of one micro-batch of full length in one worker: activations (kept for the backward pass if `trained`) and
    logits, of which a block is widened to float32."""
    tokens = micro_batch_tokens(cfg, trained=trained)
    layer = tokens * size.hidden * compute_bytes
    kept = size.num_layers * layer if trained else 0
    whole = 1 if cfg.trainer.gradient_checkpointing or not trained else size.num_layers
    block = min(cfg.trainer.logprobs_chunk_size or tokens, tokens)
    return {
        "activations": float(kept + whole * ACTIVATIONS_PER_LAYER * layer),
        "logits": float(tokens * size.vocabulary * compute_bytes + 2 * block * size.vocabulary * 4),
    }


def server(cfg: Any, size: ModelSize, dtype: str) -> dict[str, float]:
    """Bytes of one server: weights, and the cache that `max_num_seqs` samples of full length would fill, on each of its
    GPUs."""
    engine = cfg.generator.inference_engine
    width, item = engine.gpus_per_server, BYTES[dtype]
    return {
        "weights": size.num_params * item / width,
        "kv cache": size.kv_elements * item * longest(cfg) * engine.max_num_seqs / width,
    }


def longest(cfg: Any) -> int:
    """Tokens of the longest trajectory: its context at the start of the last turn, and that turn."""
    return int(cfg.generator.max_input_length + cfg.generator.sampling_params.max_generate_length)


def micro_batch_tokens(cfg: Any, *, trained: bool) -> int:
    """Tokens of one pass of one worker at most."""
    trainer = cfg.trainer
    if trainer.max_tokens_per_microbatch > 0:
        return max(trainer.max_tokens_per_microbatch, longest(cfg))
    rows = trainer.micro_train_batch_size_per_gpu if trained else trainer.micro_forward_batch_size_per_gpu
    return int(rows * longest(cfg))


def shown(parts: Mapping[str, float]) -> str:
    """`7.2 GiB (weights 2.9, gradients 2.9, ...)`."""
    total = sum(parts.values())
    each = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in parts.items())
    return f"{_gib(total)} GiB ({each})"


def _gib(nbytes: float) -> str:
    gib = nbytes / GIB
    return f"{gib:.1f}" if gib >= 0.1 else f"{gib:.3f}"
