"""Which token each row draws from its logits, and the logprobs reported for it: one call for all rows of a step.

What a row draws depends on its logits, its seed and its position alone; the order is bias, penalties, min-p, top-k,
top-p, as the protocol's reference server has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from skyrl_rollout.tokens import LogprobMode, Sampling


@dataclass(frozen=True)
class DrawnRow:
    """What is asked for one row. u: uniform in [0, 1). prompt, output: its ids so far. forbidden: tokens that may not
    be drawn. top: how many of the most probable tokens to report."""

    sampling: Sampling
    mode: LogprobMode
    u: float
    prompt: np.ndarray
    output: Sequence[int]
    forbidden: tuple[int, ...] = ()
    top: int = 0

    @property
    def is_shaped(self) -> bool:
        return bool(self.forbidden) or not self.sampling.is_full_distribution

    @property
    def reported_scale(self) -> float:
        """What logits are divided by for the reported logprobs, where those are of the full vocabulary."""
        return reported_scale(self.mode, self.sampling.temperature)


@dataclass(frozen=True)
class Draws:
    """token_ids [R], logprobs [R]; tops: per row (ids [k], logprobs [k]), or None."""

    token_ids: list[int]
    logprobs: list[float]
    tops: list[tuple[np.ndarray, np.ndarray] | None]


def reported_scale(mode: LogprobMode, temperature: float) -> float:
    """1 for RAW and for greedy, the temperature for the other modes."""
    return 1.0 if mode is LogprobMode.RAW or temperature == 0.0 else temperature


def draw(logits_RV: torch.Tensor, rows: Sequence[DrawnRow]) -> Draws:
    """logits_RV: float32. Greedy rows take the argmax after penalties and report log_softmax(logits)."""
    temperatures = [1.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
    kept_RV = _log_softmax(_shaped(logits_RV, rows) / _column(temperatures, logits_RV))
    token_ids = _inverse_cdf(kept_RV, [row.u for row in rows])
    greedy = torch.tensor([row.sampling.is_greedy for row in rows], device=logits_RV.device)
    token_ids = torch.where(greedy, kept_RV.argmax(dim=-1), token_ids)
    reported_RV = _reported(logits_RV, kept_RV, rows, temperatures)
    logprobs = reported_RV.gather(1, token_ids[:, None])[:, 0]
    tops = [top(reported_RV[i], row.top) if row.top else None for i, row in enumerate(rows)]
    return Draws(token_ids.tolist(), logprobs.tolist(), tops)


def top(logprobs_V: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [k], logprobs float32 [k]) of the most probable tokens, best first."""
    values, ids = logprobs_V.topk(k)
    return ids.cpu().numpy().astype(np.int32), values.cpu().numpy()


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _reported(
    logits_RV: torch.Tensor, kept_RV: torch.Tensor, rows: Sequence[DrawnRow], temperatures: list[float]
) -> torch.Tensor:
    """SAMPLING reports what was drawn from, everything else the full vocabulary of the plain logits."""
    full = [
        i
        for i, row in enumerate(rows)
        if row.reported_scale != temperatures[i]
        or (row.is_shaped and (row.sampling.is_greedy or row.mode is not LogprobMode.SAMPLING))
    ]
    if not full:
        return kept_RV
    reported_RV = kept_RV.clone()
    scales = _column([rows[i].reported_scale for i in full], logits_RV)
    reported_RV[full] = _log_softmax(logits_RV[full] / scales)
    return reported_RV


def _inverse_cdf(kept_RV: torch.Tensor, u: list[float]) -> torch.Tensor:
    """The first token whose cumulative probability exceeds u of the whole; float64, since vocabularies are large."""
    cdf_RV = kept_RV.double().exp().cumsum(dim=-1)
    total_R1 = cdf_RV[:, -1:]
    wanted_R1 = torch.tensor(u, dtype=torch.float64, device=kept_RV.device)[:, None] * total_R1
    found = torch.searchsorted(cdf_RV, wanted_R1, right=True)[:, 0]
    return torch.minimum(found, (cdf_RV < total_R1).sum(dim=-1))  # rounding must not go beyond the last one kept


def _shaped(logits_RV: torch.Tensor, rows: Sequence[DrawnRow]) -> torch.Tensor:
    """A copy, where any row needs one, with bias, penalties, forbidden tokens and truncation applied."""
    shaped = [i for i, row in enumerate(rows) if row.is_shaped]
    if not shaped:
        return logits_RV
    out_RV = logits_RV.clone()
    for i in shaped:
        _penalise(out_RV[i], rows[i])
    cut = [i for i in shaped if _truncates(rows[i].sampling)]
    if cut:
        out_RV[cut] = _truncated(out_RV[cut], [rows[i].sampling for i in cut])
    return out_RV


def _penalise(logits_V: torch.Tensor, row: DrawnRow) -> None:
    """In place: logit bias, repetition penalty (prompt and output; Keskar et al. 2019), frequency and presence
    penalties (output only), and the forbidden tokens."""
    s = row.sampling
    for token, bias in s.logit_bias.items():
        logits_V[token] += bias
    if s.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([row.prompt, np.asarray(row.output, np.int64)]).astype(np.int64))
        index = torch.from_numpy(seen).to(logits_V.device)
        old = logits_V[index]
        logits_V[index] = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
    if row.output and (s.frequency_penalty or s.presence_penalty):
        tokens, counts = np.unique(np.asarray(row.output, np.int64), return_counts=True)
        penalty = torch.from_numpy((s.frequency_penalty * counts + s.presence_penalty).astype(np.float32))
        logits_V[torch.from_numpy(tokens).to(logits_V.device)] -= penalty.to(logits_V.device)
    if row.forbidden:
        logits_V[list(row.forbidden)] = -math.inf


def _truncates(s: Sampling) -> bool:
    return not s.is_greedy and (s.min_p > 0 or s.top_k > 0 or s.top_p < 1.0)


def _truncated(logits_RV: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """-inf outside min-p, then top-k, then top-p (nucleus, Holtzman et al. 2020); at least one token is left."""
    vocab_size = logits_RV.shape[1]
    out_RV = logits_RV / _column([s.temperature for s in samplings], logits_RV)
    floor_R1 = _column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], logits_RV)
    out_RV = out_RV.masked_fill(out_RV < out_RV.amax(dim=-1, keepdim=True) + floor_R1, -math.inf)
    sorted_RV, order_RV = out_RV.sort(dim=-1, descending=True, stable=True)
    ks = [min(s.top_k, vocab_size) if s.top_k > 0 else vocab_size for s in samplings]
    least_R1 = sorted_RV.gather(1, torch.tensor(ks, device=logits_RV.device)[:, None] - 1)
    sorted_RV = sorted_RV.masked_fill(sorted_RV < least_R1, -math.inf)
    probs_RV = torch.softmax(sorted_RV, dim=-1, dtype=torch.float64)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    top_p_R1 = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=logits_RV.device)[:, None]
    outside_RV = sorted_RV.isneginf() | ((top_p_R1 < 1.0) & (before_RV >= top_p_R1))
    return logits_RV.masked_fill(torch.zeros_like(outside_RV).scatter(1, order_RV, outside_RV), -math.inf)
