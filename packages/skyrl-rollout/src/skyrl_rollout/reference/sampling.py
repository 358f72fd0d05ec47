"""Which token is drawn from logits, and its logprob in each mode; random by the request's seed and the position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from skyrl_rollout.reference.logits import mix, uniform
from skyrl_rollout.seeds import SEED_MASK, STRIDE
from skyrl_rollout.tokens import LogprobMode, Sampling


class Draw(NamedTuple):
    """A token, the reported logprobs float64 [V] of every token there, and those really drawn from, -inf outside."""

    token: int
    logprobs_V: np.ndarray
    kept_V: np.ndarray


def uniforms(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """float64 [R] in [0, 1), a function of `seeds.continued_seed(seed, position)`: restarting, reordering or moving a
    request changes nothing."""
    moved_R = (seeds_R + positions_R.astype(np.uint64) * np.uint64(STRIDE)) & np.uint64(SEED_MASK)
    return uniform(mix(moved_R))


def log_softmax(logits_RV: np.ndarray) -> np.ndarray:
    """log_softmax over the last axis, in float64."""
    shifted = logits_RV - logits_RV.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def largest(values_V: np.ndarray, k: int) -> np.ndarray:
    """The indices [k] of the largest values, best first; equal ones by their index."""
    return np.argsort(-values_V, kind="stable")[:k]


def draw_plain(
    logits_RV: np.ndarray, temperatures_R: np.ndarray, raw_R: np.ndarray, u_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(token int64 [R], reported logprobs float64 [R, V]): drawn from softmax(logits / T) itself, greedy where T = 0.

    raw_R: bool [R], rows that report log_softmax(logits); the others report log_softmax(logits / T).
    """
    greedy_R = temperatures_R == 0
    scale_R = np.where(greedy_R, 1.0, temperatures_R)
    logprobs_RV = log_softmax(logits_RV / scale_R[:, None])
    cdf_RV = np.exp(logprobs_RV).cumsum(axis=1)
    tokens_R = (cdf_RV <= (u_R * cdf_RV[:, -1])[:, None]).sum(axis=1)
    tokens_R = np.where(greedy_R, logits_RV.argmax(axis=1), np.minimum(tokens_R, logits_RV.shape[1] - 1))
    again_R = raw_R & (scale_R != 1.0)
    if again_R.any():
        logprobs_RV[again_R] = log_softmax(logits_RV[again_R])
    return tokens_R, logprobs_RV


def draw_shaped(
    logits_V: np.ndarray,
    sampling: Sampling,
    mode: LogprobMode,
    u: float,
    *,
    prompt: np.ndarray,
    output: list[int],
    forbidden: tuple[int, ...],
) -> Draw:
    """One row with bias, penalties, min-p, top-k or top-p; `forbidden` tokens cannot be drawn."""
    shaped_V = penalised(logits_V, sampling, prompt=prompt, output=output)
    shaped_V[list(forbidden)] = -np.inf
    if sampling.is_greedy:
        token = int(shaped_V.argmax())
        kept_V = np.full(len(shaped_V), -np.inf)
        kept_V[token] = 0.0
        return Draw(token, log_softmax(logits_V), kept_V)
    kept_V = log_softmax(truncated(shaped_V / sampling.temperature, sampling))
    cdf_V = np.exp(kept_V).cumsum()
    token = int(np.searchsorted(cdf_V, u * cdf_V[-1], side="right"))
    token = min(token, int(np.flatnonzero(np.isfinite(kept_V))[-1]))
    if mode is LogprobMode.SAMPLING:
        return Draw(token, kept_V, kept_V)
    scale = sampling.temperature if mode is LogprobMode.TEMPERATURE else 1.0
    return Draw(token, log_softmax(logits_V / scale), kept_V)


def penalised(logits_V: np.ndarray, s: Sampling, *, prompt: np.ndarray, output: list[int]) -> np.ndarray:
    """A copy with logit bias, repetition penalty (prompt and output; Keskar et al. 2019), frequency and presence
    penalties (output only)."""
    out_V = logits_V.copy()
    for token, bias in s.logit_bias.items():
        out_V[token] += bias
    if s.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([prompt, np.asarray(output, np.int64)]).astype(np.int64))
        out_V[seen] = np.where(out_V[seen] > 0, out_V[seen] / s.repetition_penalty, out_V[seen] * s.repetition_penalty)
    if output and (s.frequency_penalty or s.presence_penalty):
        tokens, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        out_V[tokens] -= s.frequency_penalty * counts + s.presence_penalty
    return out_V


def truncated(logits_V: np.ndarray, s: Sampling) -> np.ndarray:
    """-inf outside min-p, then top-k, then top-p (nucleus, Holtzman et al. 2020); at least one token is left."""
    out_V = logits_V.copy()
    if s.min_p > 0:
        out_V[out_V < out_V.max() + np.log(s.min_p)] = -np.inf
    if 0 < s.top_k < len(out_V):
        out_V[out_V < np.partition(out_V, -s.top_k)[-s.top_k]] = -np.inf
    if s.top_p < 1.0:
        order = np.argsort(-out_V, kind="stable")
        probs = np.exp(log_softmax(out_V[order]))
        before = probs.cumsum() - probs
        out_V[order[before >= s.top_p]] = -np.inf
    return out_V
