"""Weights that are made rather than trained: noise for any model, and weights under which every token is one token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from skyrl_rollout.conformance.item import NotRun
from skyrl_rollout.weights.manifest import TensorLayout

EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")
FORCING = 1000.0  # a bias that no other logit of a stand-in model can reach
SHARPNESS = 100.0
SPREAD = 5.5  # standard deviation of the logits under noise: neither flat nor certain of one token
LAYER_GAIN = 2.0  # what layers add must outweigh the embedding, else a tied model repeats its last token

Weights = dict[str, bytes]


def noise(tensors: Sequence[TensorLayout], seed: int) -> Weights:
    """Normal values under which a transformer says various tokens, each with a probability below 1; norms lie around
    1."""
    rng = np.random.default_rng(seed)
    made = {}
    for t in tensors:
        if len(t.shape) < 2:
            values: np.ndarray = 1 + rng.standard_normal(t.shape, np.float32) / 10
        else:
            gain = SPREAD if t.name.endswith(EMBEDDINGS) else LAYER_GAIN
            scale = gain / math.sqrt(math.prod(t.shape[1:]))
            values = rng.standard_normal(t.shape, np.float32) * np.float32(scale)
        made[t.name] = to_bytes(values, t.dtype)
    return made


def saying(tensors: Sequence[TensorLayout], token: int, vocab_size: int) -> Weights:
    """Weights under which a model answers nothing but `token`, whatever it was asked.

    All layers add nothing, each embedding points the same way and that of `token` is twice as long, so that tied or
    not its logit is the largest. A stand-in for a model reads its bias for each token from the first tensor with a
    value for every one of them, flat, so the place of `token` there is FORCING. Raises NotRun for a model whose
    embedding is not named as a Llama's.
    """
    canary = next((t for t in tensors if math.prod(t.shape) >= vocab_size), None)
    if canary is None or not any(t.name.endswith(EMBEDDINGS) for t in tensors):
        raise NotRun(f"a model with an embedding named {' or '.join(EMBEDDINGS)}")
    made = {}
    for t in tensors:
        values = np.zeros(t.shape, np.float32) if len(t.shape) > 1 else np.ones(t.shape, np.float32)
        if t.name.endswith(EMBEDDINGS):
            values[:, -1] = 1.0
            values[token, -1] = 2.0
        elif t.name.endswith("model.norm.weight"):
            values *= SHARPNESS
        if t is canary:
            values.reshape(-1)[:vocab_size] = np.where(len(t.shape) > 1, values.reshape(-1)[:vocab_size], 0.0)
            values.reshape(-1)[token] = FORCING
        made[t.name] = to_bytes(values, t.dtype)
    return made


def broken(tensors: Sequence[TensorLayout]) -> Weights:
    """NaN in every value."""
    return {t.name: to_bytes(np.full(t.shape, math.nan, np.float32), t.dtype) for t in tensors}


def to_bytes(values: np.ndarray, dtype: str) -> bytes:
    """float32 values in the dtype that travels; integers are cut off. Raises NotRun for a dtype not made here."""
    if dtype == "f32":
        return values.astype("<f4").tobytes()
    if dtype == "f16":
        return values.astype("<f2").tobytes()
    if dtype == "bf16":
        bits = values.astype("<f4").view("<u4")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2").tobytes()
    raise NotRun(f"a model whose weights are f32, f16 or bf16, not {dtype}")
