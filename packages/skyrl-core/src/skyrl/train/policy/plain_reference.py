"""A Qwen3 model, its GRPO update and a critic's, the plain way in float64: what every backend is checked against.

One sequence at a time, no padding, no batching, no library but torch. It shares no code with the backends or with
`algorithms`, so that a mistake must be made twice to go unseen.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from skyrl.train.policy.batch import TrajectoryBatch

Weights = dict[str, torch.Tensor]


@dataclass
class PlainPolicy:
    """Weights by checkpoint name and AdamW's moments; `shape` is the checkpoint's config.json."""

    shape: dict[str, Any]
    weights: Weights
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    steps: int = 0

    @staticmethod
    def load(folder: Path) -> PlainPolicy:
        weights = {k: v.double().requires_grad_() for k, v in load_file(folder / "model.safetensors").items()}
        return PlainPolicy(json.loads((folder / "config.json").read_text()), weights)

    def logits(self, token_ids_L: torch.Tensor) -> torch.Tensor:
        """[L, V]."""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self.hidden(token_ids_L) @ head.T

    def hidden(self, token_ids_L: torch.Tensor) -> torch.Tensor:
        """[L, D] (Qwen3 technical report, arXiv 2505.09388: pre-norm, QK-norm, rotary, grouped queries, SwiGLU)."""
        w, eps = self.weights, self.shape["rms_norm_eps"]
        hidden = w["model.embed_tokens.weight"][token_ids_L]
        for layer in range(self.shape["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            hidden = hidden + self._attention(_norm(hidden, w[f"{name}.input_layernorm.weight"], eps), name)
            inner = _norm(hidden, w[f"{name}.post_attention_layernorm.weight"], eps)
            gate = torch.nn.functional.silu(inner @ w[f"{name}.mlp.gate_proj.weight"].T)
            hidden = hidden + (gate * (inner @ w[f"{name}.mlp.up_proj.weight"].T)) @ w[f"{name}.mlp.down_proj.weight"].T
        return _norm(hidden, w["model.norm.weight"], eps)

    def logprobs(self, batch: TrajectoryBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(log p of each response token, entropy at each), both [T]."""
        logprobs, entropies = [], []
        start = 0
        for length, prompt in zip(batch.seq_lens_S.tolist(), batch.prompt_lens_S.tolist(), strict=True):
            tokens = batch.token_ids_N[start : start + length]
            table = torch.log_softmax(self.logits(tokens) / temperature, dim=-1)
            for position in range(prompt, length):
                row = table[position - 1]
                logprobs.append(row[tokens[position]])
                entropies.append(-(row.exp() * row).sum())
            start += length
        return torch.stack(logprobs), torch.stack(entropies)

    def loss(self, batch: TrajectoryBatch, algorithm: Any, temperature: float) -> torch.Tensor:
        """Clipped surrogate, k3 KL (at most 10 per token) and entropy over one mini-batch, token by token."""
        logprobs_T, entropy_T = self.logprobs(batch, temperature)
        share = _token_shares(batch, algorithm.loss_reduction)
        kl_share = _token_shares(batch, "sequence_mean")
        num_tokens = float(batch.loss_mask_T.sum())
        old_T, advantages_T = batch.require("old_logprobs_T").double(), batch.require("advantages_T").double()
        total = torch.zeros((), dtype=torch.float64)
        for t in range(logprobs_T.numel()):
            if batch.loss_mask_T[t] == 0:
                continue
            ratio = torch.exp(logprobs_T[t] - old_T[t])
            total = total + share[t] * _surrogate(ratio, float(advantages_T[t]), algorithm)
            if algorithm.use_kl_loss:
                gap = batch.require("ref_logprobs_T")[t].double() - logprobs_T[t]
                total = total + algorithm.kl_loss_coef * kl_share[t] * (torch.exp(gap) - 1 - gap).clamp(max=10)
            if algorithm.use_entropy_loss:
                total = total - algorithm.entropy_loss_coef * entropy_T[t] / num_tokens
        return total

    def gradients(self, batch: TrajectoryBatch, algorithm: Any, temperature: float) -> Weights:
        names = list(self.weights)
        grads = torch.autograd.grad(self.loss(batch, algorithm, temperature), [self.weights[n] for n in names])
        return dict(zip(names, grads, strict=True))

    def adamw_step(self, gradients: Weights, optimizer: Any) -> float:
        """Clips to `max_grad_norm`, then AdamW (arXiv 1711.05101) with eps 1e-8; returns the norm before clipping."""
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        scale = min(1.0, optimizer.max_grad_norm / (norm + 1e-6))
        self.steps += 1
        beta1, beta2 = optimizer.adam_betas
        for name, weight in self.weights.items():
            g = gradients[name] * scale
            first, second = self.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
            self.moments[name] = (first, second)
            mean, spread = first / (1 - beta1**self.steps), second / (1 - beta2**self.steps)
            with torch.no_grad():
                weight *= 1 - optimizer.lr * optimizer.weight_decay
                weight -= optimizer.lr * mean / (spread.sqrt() + 1e-8)
        return norm

    def _attention(self, inner_LD: torch.Tensor, name: str) -> torch.Tensor:
        w, eps, size = self.weights, self.shape["rms_norm_eps"], self.shape["head_dim"]
        length = inner_LD.shape[0]

        def heads(part: str) -> torch.Tensor:
            return (inner_LD @ w[f"{name}.self_attn.{part}_proj.weight"].T).view(length, -1, size).transpose(0, 1)

        query = _rotate(_norm(heads("q"), w[f"{name}.self_attn.q_norm.weight"], eps), self._theta())
        key = _rotate(_norm(heads("k"), w[f"{name}.self_attn.k_norm.weight"], eps), self._theta())
        repeat = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(repeat, 0), heads("v").repeat_interleave(repeat, 0)
        scores = query @ key.transpose(1, 2) / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value
        return mixed.transpose(0, 1).reshape(length, -1) @ w[f"{name}.self_attn.o_proj.weight"].T

    def _theta(self) -> float:
        return float(self.shape.get("rope_parameters", self.shape)["rope_theta"])


@dataclass
class PlainCritic(PlainPolicy):
    """The same trunk with `value_head.weight`, [1, D]."""

    @staticmethod
    def load(folder: Path) -> PlainCritic:
        plain = PlainPolicy.load(folder)
        plain.weights.pop("lm_head.weight", None)
        return PlainCritic(plain.shape, plain.weights)

    def values(self, batch: TrajectoryBatch) -> torch.Tensor:
        """[T]: the head at the token before each response token."""
        values, start = [], 0
        for length, prompt in zip(batch.seq_lens_S.tolist(), batch.prompt_lens_S.tolist(), strict=True):
            hidden = self.hidden(batch.token_ids_N[start : start + length])
            values += [
                hidden[position - 1] @ self.weights["value_head.weight"][0] for position in range(prompt, length)
            ]
            start += length
        return torch.stack(values)

    def loss(self, batch: TrajectoryBatch, algorithm: Any, temperature: float) -> torch.Tensor:
        """Half the larger of the plain and the clipped squared error, per sequence and then over sequences."""
        values_T = self.values(batch)
        share = _token_shares(batch, "sequence_mean")
        total = torch.zeros((), dtype=torch.float64)
        for t in range(values_T.numel()):
            if batch.loss_mask_T[t] == 0:
                continue
            wanted, before = float(batch.require("returns_T")[t]), float(batch.require("values_T")[t])
            near = before + (values_T[t] - before).clamp(-algorithm.value_clip, algorithm.value_clip)
            total = total + share[t] * torch.maximum((values_T[t] - wanted) ** 2, (near - wanted) ** 2) / 2
        return total


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x_HLD: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding (arXiv 2104.09864), halves layout. transformers computes its angles in float32, whatever the
    model's dtype; so does this."""
    length, size = x_HLD.shape[1], x_HLD.shape[2]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    angles = torch.arange(length).float()[:, None] * frequencies
    cos, sin = torch.cat([angles, angles], 1).cos().double(), torch.cat([angles, angles], 1).sin().double()
    turned = torch.cat([-x_HLD[..., size // 2 :], x_HLD[..., : size // 2]], -1)
    return x_HLD * cos + turned * sin


def _surrogate(ratio: torch.Tensor, advantage: float, algorithm: Any) -> torch.Tensor:
    bounded = ratio.clamp(1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if algorithm.policy_loss_type == "dual_clip" and advantage < 0:
        return torch.minimum(loss, torch.tensor(-advantage * algorithm.clip_ratio_c, dtype=loss.dtype))
    return loss


def _token_shares(batch: TrajectoryBatch, reduction: str) -> list[float]:
    """What each token's loss is multiplied by, counted by hand."""
    masks = [part.tolist() for part in batch.loss_mask_T.split(batch.response_lens_S.tolist())]
    all_tokens = sum(sum(mask) for mask in masks)
    shares = []
    for mask in masks:
        for m in mask:
            whole = all_tokens if reduction == "token_mean" else len(masks) * max(sum(mask), 1)
            shares.append(m / whole)
    return shares
