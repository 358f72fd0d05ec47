"""Weights that show their version in every token, and the tokens that a canary server must therefore have made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from skyrl_rollout.reference.logits import CONTEXT, NO_TOKEN, LogitTable, canary_bias
from skyrl_rollout.reference.sampling import draw_plain, uniforms
from skyrl_rollout.tokens import FinishReason, Sample, Sampling
from skyrl_rollout.weights.manifest import TensorLayout

VOCAB = 512
BLOCK = 16  # tokens that a version lets through; the first block of the vocabulary belongs to the end token
FORCING = 1000.0
END_GAP = 3.0  # how far the end token lies below the block: a sample ends by itself after some 250 tokens
ADAPTER_FORCING = 5000.0
SIDE = 1024  # of the matrix that makes an update weigh 4 MB, so that one that is never given back shows

LAYOUT = (
    TensorLayout("canary.weight", "f32", (VOCAB,)),
    TensorLayout("model.embed_tokens.weight", "f32", (VOCAB, 16)),
    TensorLayout("model.layers.0.weight", "f32", (SIDE, SIDE)),
)
ADAPTED = "base_model.model.model.embed_tokens"
ADAPTER_LAYOUT = (
    TensorLayout(f"{ADAPTED}.lora_A.weight", "f32", (1, 16)),
    TensorLayout(f"{ADAPTED}.lora_B.weight", "f32", (VOCAB, 1)),
)

Tensors = list[tuple[str, memoryview]]
_FILLER = {t.name: np.random.default_rng(0).standard_normal(t.shape).astype("<f4") for t in LAYOUT[1:]}


def _forcing(version: int, strength: float, end: float) -> np.ndarray:
    """`version` stands among the values, so that their digest, and with it each logit, differs between versions."""
    values = np.zeros(VOCAB, "<f4")
    first = BLOCK * (1 + version % (VOCAB // BLOCK - 1))
    values[first : first + BLOCK] = strength
    values[0], values[1] = end, -1.0 - version / 1024
    return values


def tensors(version: int) -> Tensors:
    """The weights of a version of the base policy."""
    _FILLER["model.layers.0.weight"][0, 0] = version
    named = {"canary.weight": _forcing(version, FORCING, FORCING - END_GAP)} | _FILLER
    return [(t.name, memoryview(named[t.name])) for t in LAYOUT]


def adapter_tensors(version: int) -> Tensors:
    """Those of a version of a rank 1 adapter, over any version of the base."""
    up = _forcing(version, ADAPTER_FORCING, ADAPTER_FORCING - FORCING).reshape(VOCAB, 1)
    down = np.ones((1, 16), "<f4")
    return [(ADAPTER_LAYOUT[0].name, memoryview(down)), (ADAPTER_LAYOUT[1].name, memoryview(up))]


@lru_cache(maxsize=64)
def bias(version: int) -> np.ndarray:
    """float64 [V]: what a version of the base adds to the logits."""
    return canary_bias(LAYOUT[0], _data(_forcing(version, FORCING, FORCING - END_GAP)), VOCAB)


@lru_cache(maxsize=8)
def adapter_bias(version: int) -> np.ndarray:
    """float64 [V]: what a version of the adapter adds to that."""
    up = _forcing(version, ADAPTER_FORCING, ADAPTER_FORCING - FORCING)
    return canary_bias(ADAPTER_LAYOUT[1], _data(up), VOCAB)


def _data(values: np.ndarray) -> memoryview:
    return memoryview(values).cast("B")


def write_model(folder: Path) -> Path:
    """A model folder for `skyrl-rollout reference --model`: this layout, and version 0 in it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": VOCAB, "max_position_embeddings": 1024, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for t in LAYOUT:
        header[t.name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    head = json.dumps(header).encode()
    data = b"".join(bytes(data.cast("B")) for _, data in tensors(0))
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return folder


class Expectation:
    """What a canary server of `write_model` answers, computed here from the prompt, the seed and the versions."""

    def __init__(self) -> None:
        self._table = LogitTable(0, VOCAB)

    def check(
        self,
        prompt: list[int],
        sampling: Sampling,
        index: int,
        sample: Sample,
        *,
        stops_on_commit: bool = False,
        adapter_over: int | None = None,
    ) -> None:
        """Raises AssertionError unless sample `index` of a seeded request is whole, and each of its tokens and logprobs
        is what the version that is named for it makes at that place. adapter_over: versions are those of the adapter,
        over this one of the base."""
        problems = [
            *_unfinished(sampling, sample, stops_on_commit),
            *self._wrong(prompt, sampling, index, sample, adapter_over),
        ]
        assert not problems, f"sample {index} of seed {sampling.seed}: {'; '.join(problems)}"

    def _wrong(
        self, prompt: list[int], sampling: Sampling, index: int, sample: Sample, adapter_over: int | None
    ) -> Iterator[str]:
        n, ids, versions = len(sample.token_ids), sample.token_ids, sample.weight_versions
        if not len(versions) == len(sample.logprobs) == n == sum(s.length for s in sample.spans):
            yield f"{n} tokens, {len(sample.logprobs)} logprobs, {len(versions)} versions, spans {sample.spans}"
            return
        if not n:
            return
        if (np.diff(versions) < 0).any():
            yield f"its versions go back: {sample.spans}"
        before = np.concatenate([[NO_TOKEN] * CONTEXT, prompt, ids])[len(prompt) :]
        last_N4 = np.lib.stride_tricks.sliding_window_view(before, CONTEXT)[:n].astype(np.int64)
        logits_NV = self._table.logits(last_N4)
        if adapter_over is not None:
            logits_NV += bias(adapter_over)
        logits_NV += np.stack([(bias if adapter_over is None else adapter_bias)(int(v)) for v in versions])
        seeds_N = np.full(n, sampling.seed, np.uint64) + np.uint64(index)
        raw_N = np.ones(n, bool)
        tokens_N, logprobs_NV = draw_plain(logits_NV, np.ones(n), raw_N, uniforms(seeds_N, np.arange(n)))
        if (wrong := np.flatnonzero(tokens_N != ids)).size:
            p = int(wrong[0])
            yield (
                f"{wrong.size} of {n} tokens are others, the first is number {p}: {ids[p]} where version {versions[p]} "
                f"makes {tokens_N[p]}; {sample.spans}"
            )
        elif (logprobs_NV[np.arange(n), ids].astype(np.float32) != sample.logprobs).any():
            yield "its logprobs are not those of its tokens"


def _unfinished(sampling: Sampling, sample: Sample, stops_on_commit: bool) -> Iterator[str]:
    ids, reason, ends = sample.token_ids, sample.finish_reason, np.flatnonzero(sample.token_ids == 0)
    if reason is FinishReason.EOS:
        whole = len(ends) == 1 and ends[0] == len(ids) - 1
    elif reason is FinishReason.LENGTH:
        whole = len(ids) == sampling.max_tokens and not len(ends)
    else:
        whole = stops_on_commit and reason is FinishReason.VERSION_CHANGED and not len(ends)
    if not whole or len(ids) > (sampling.max_tokens or 0):
        yield f"it ends with {reason.name} after {len(ids)} of {sampling.max_tokens} tokens, end tokens at {list(ends)}"
    if stops_on_commit and len(set(sample.weight_versions.tolist())) > 1:
        yield f"it mixes versions: {sample.spans}"
