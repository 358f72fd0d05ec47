"""Tiny random models of every covered family, batches of groups, and the plain way to compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.fsdp.float64 import widen_norms
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 61
TEMPERATURE = 0.7
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Any] = {
    "qwen2": lambda **o: Qwen2ForCausalLM(Qwen2Config(**SMALL | o)),
    "qwen3": lambda **o: Qwen3ForCausalLM(Qwen3Config(**SMALL | {"head_dim": 8} | o)),
    "qwen3_moe": lambda **o: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SMALL | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} | o
        )
    ),
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**SMALL | o)),
    "mistral": lambda **o: MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": None} | o)),
}


def model_of(family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """In training mode, with weights large enough that attention is not flat."""
    torch.manual_seed(0)
    model = FAMILIES[family](**overrides).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
    if dtype == torch.float64:
        widen_norms(model)
        if family == "qwen3_moe":
            model.set_experts_implementation("eager")  # grouped products take no float64
            widen_routers(model)
    return model.train()


def widen_routers(model: Any) -> None:
    """transformers' router passes through float32, which would hide differences below 1e-8."""

    def route(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, module.hidden_dim) @ module.weight.T
        scores, chosen = torch.topk(torch.softmax(logits, -1), module.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True) if module.norm_topk_prob else scores, chosen

    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.forward = MethodType(route, module)


def batch_of(rows: Sequence[tuple[int, int, int]], *, seed: int = 0, equal_prompts: bool = False) -> TrajectoryBatch:
    """One sequence per (group id, prompt length, response length); equal prompts: of all groups of one length."""
    generator = torch.Generator().manual_seed(seed)
    prompts: dict[tuple[int, int], torch.Tensor] = {}
    tokens = []
    for group, prompt_len, response_len in rows:
        name = (0 if equal_prompts else group, prompt_len)
        if name not in prompts:
            prompts[name] = torch.randint(0, VOCABULARY, (prompt_len,), generator=generator)
        tokens += [prompts[name], torch.randint(0, VOCABULARY, (response_len,), generator=generator)]
    total = sum(row[2] for row in rows)

    def numbers() -> torch.Tensor:
        return torch.randn(total, generator=generator)

    return TrajectoryBatch(
        token_ids_N=torch.cat(tokens),
        seq_lens_S=torch.tensor([p + r for _, p, r in rows]),
        prompt_lens_S=torch.tensor([p for _, p, _ in rows]),
        group_ids_S=torch.tensor([g for g, _, _ in rows]),
        loss_mask_T=(torch.rand(total, generator=generator) < 0.8).float(),
        rewards_T=numbers(),
        rollout_logprobs_T=-numbers().abs(),
        weight_versions_T=torch.zeros(total, dtype=torch.int64),
        old_logprobs_T=-4 - numbers().abs() / 4,
        ref_logprobs_T=-4 - numbers().abs() / 4,
        advantages_T=numbers(),
    )


def one_by_one(model: Any, batch: TrajectoryBatch, temperature: float = TEMPERATURE) -> tuple[Any, Any]:
    """(logprobs_T, entropy_T): each sequence in a row of its own, by nothing but the model and log_softmax."""
    logprobs, entropies, start = [], [], 0
    for length, prompt_len in zip(batch.seq_lens_S.tolist(), batch.prompt_lens_S.tolist(), strict=True):
        tokens = batch.token_ids_N[start : start + length]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, prompt_len - 1 : -1]
        table = torch.log_softmax(logits / temperature, -1)
        logprobs.append(table.gather(-1, tokens[prompt_len:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """By name, of what is trained; left clean."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest gradient of all."""
    assert found.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    assert largest > 0
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / largest
