"""The reference engine: exact logprobs, tokens by seed and position only, logits that follow weights."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.reference.logits import LogitTable, canary_bias
from skyrl_rollout.reference.model import ModelFolder, to_float64
from skyrl_rollout.reference.sampling import draw_plain, draw_shaped, log_softmax, penalised, truncated
from skyrl_rollout.server.engine import EngineRequest, SampleEnded, TokensMade
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling
from skyrl_rollout.weights.manifest import TensorLayout

PROMPT = np.arange(1, 9, dtype=np.int32)
VOCAB = 64


async def run(engine: ReferenceEngine, request_id: str = "r", num_samples: int = 1, **fields: object):
    """(token ids, logprobs, ends) per sample."""
    mode = fields.pop("mode", LogprobMode.SAMPLING)
    sampling = Sampling(**({"max_tokens": 40, "ignore_eos": True, "seed": 5} | fields))
    request = EngineRequest(request_id, PROMPT, sampling, mode, num_samples, "")
    ids, logprobs, ends = [[] for _ in range(num_samples)], [[] for _ in range(num_samples)], {}
    async for item in engine.generate(request):
        if isinstance(item, TokensMade):
            ids[item.sample_index] += item.token_ids.tolist()
            logprobs[item.sample_index] += item.logprobs.tolist()
        elif isinstance(item, SampleEnded):
            ends[item.sample_index] = item
    return ids, logprobs, ends


def contexts(tokens: list[int]) -> np.ndarray:
    whole = [*PROMPT.tolist(), *tokens]
    return np.array([whole[i - 4 : i] for i in range(len(PROMPT), len(whole))])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("mode", list(LogprobMode))
async def test_logprobs_are_those_of_the_logits_that_a_trainer_would_compute(
    mode: LogprobMode, temperature: float
) -> None:
    engine = ReferenceEngine(seed=3)
    (ids,), (logprobs,), _ = await run(engine, mode=mode, temperature=temperature)
    await engine.close()
    logits = LogitTable(3, VOCAB).logits(contexts(ids))
    scale = 1.0 if mode is LogprobMode.RAW else temperature
    expected = log_softmax(logits / scale)[np.arange(len(ids)), ids].astype(np.float32)
    assert np.array(logprobs, np.float32).tobytes() == expected.tobytes()


async def test_greedy_takes_the_largest_logit_and_says_log_softmax_of_the_logits() -> None:
    engine = ReferenceEngine(seed=3)
    (ids,), (logprobs,), _ = await run(engine, temperature=0.0)
    await engine.close()
    logits = LogitTable(3, VOCAB).logits(contexts(ids))
    assert ids == logits.argmax(axis=1).tolist()
    np.testing.assert_array_equal(np.array(logprobs, np.float32), log_softmax(logits).max(axis=1).astype(np.float32))


async def test_the_company_of_a_request_changes_no_bit_of_it() -> None:
    engine = ReferenceEngine(vocab_size=1000)
    alone = await run(engine, "alone", num_samples=3)
    crowd = [run(engine, f"other {i}", num_samples=1 + i % 3, seed=i, temperature=0.3 + i / 10) for i in range(30)]
    _, together, *_ = await asyncio.gather(crowd[0], run(engine, "again", num_samples=3), *crowd[1:])
    await engine.close()
    assert alone == together


async def test_ended_samples_say_why() -> None:
    engine = ReferenceEngine()
    (free,), _, _ = await run(engine)
    (stopped,), _, ends = await run(engine, stop_token_ids=(free[10],))
    assert (ends[0].reason, ends[0].stop_match) == (FinishReason.STOP_TOKEN, free[10])
    assert stopped == free[: free.index(free[10]) + 1]
    (least,), _, ends = await run(engine, stop_token_ids=tuple(range(32)), min_tokens=12)
    assert len(least) >= 12
    assert all(t >= 32 for t in least[:12])
    await engine.close()


async def test_pause_keep_is_exact_between_two_tokens_and_abort_frees_everything() -> None:
    engine = ReferenceEngine(token_delay_s=0.001)
    tasks = [asyncio.create_task(run(engine, str(i), num_samples=2, max_tokens=300)) for i in range(3)]
    await asyncio.sleep(0.05)
    await engine.pause("keep", clear_cache=True)
    made, steps = dict(engine.tokens_made()), engine.load().step_counter
    await asyncio.sleep(0.05)
    assert engine.tokens_made() == made
    assert engine.load().step_counter == steps
    await engine.abort("0")
    await engine.resume()
    (ids, _, ends), *others = await asyncio.gather(*tasks)
    assert [e.reason for e in ends.values()] == [FinishReason.ABORTED] * 2
    assert [len(x) for x in ids] == made["0"]
    assert all(len(x) == 300 for o in others for x in o[0])
    assert (engine.load().running, engine.load().waiting, engine.tokens_made()) == (0, 0, {})
    await engine.close()


async def test_closing_the_iterator_frees_the_slot() -> None:
    engine = ReferenceEngine(max_running=1)
    request = EngineRequest("a", PROMPT, Sampling(max_tokens=10**6, ignore_eos=True, seed=0), LogprobMode.RAW, 1, "")
    stream = engine.generate(request)
    while not isinstance(await anext(stream), TokensMade):
        pass
    assert engine.load().running == 1
    await stream.aclose()
    assert engine.load().running == 0
    (ids,), _, _ = await run(engine)
    assert len(ids) == 40
    await engine.close()


async def test_the_logits_of_a_canary_follow_every_byte_that_is_committed() -> None:
    engine = ReferenceEngine(canary=True)
    first = await run(engine)
    layout = engine.identity.tensors[0]
    weights = np.zeros(VOCAB, "<f4")
    await engine.load_weights(iter([(layout, memoryview(weights.tobytes()))]))
    assert await run(engine) == first
    weights[-1] = 1e-30
    await engine.load_weights(iter([(layout, memoryview(weights.tobytes()))]))
    assert (await run(engine))[0] != first[0]
    weights[9] = 1e3
    await engine.load_weights(iter([(layout, memoryview(weights.tobytes()))]))
    assert (await run(engine))[0] == [[9] * 40]
    plain = ReferenceEngine()
    before = await run(plain)
    await plain.load_weights(iter([(layout, memoryview(weights.tobytes()))]))
    assert await run(plain) == before
    await engine.close()
    await plain.close()


def test_a_model_folder_gives_layout_and_first_weights(tmp_path: Path) -> None:
    bf16 = (np.arange(24, dtype="<f4").view("<u4") >> 16).astype("<u2").tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [12, 2], "data_offsets": [0, 48]},
        "lm_head.weight": {"dtype": "BF16", "shape": [12, 2], "data_offsets": [0, 48]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bf16)
    config = {"vocab_size": 12, "max_position_embeddings": 9, "tie_word_embeddings": True, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = ModelFolder(tmp_path)
    assert folder.identity.tensors == (TensorLayout("model.embed_tokens.weight", "bf16", (12, 2)),)
    assert (folder.identity.dtype, folder.identity.eos_token_ids) == ("bf16", (2,))
    np.testing.assert_array_equal(to_float64(folder.read("model.embed_tokens.weight"), "bf16"), np.arange(24))
    engine = ReferenceEngine(tmp_path, canary=True)
    layout = folder.identity.tensors[0]
    np.testing.assert_array_equal(engine._table.bias_V, canary_bias(layout, memoryview(bf16), 12))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", b"{", "config.json"),
        ("config.json", b"{}", "vocab_size"),
        ("model.safetensors", b"short", "model.safetensors"),
        ("model.safetensors", struct.pack("<Q", 2**60), "model.safetensors"),
        ("model.safetensors", None, "safetensors"),
    ],
)
def test_a_broken_model_folder_is_refused_with_the_file_named(
    tmp_path: Path, name: str, content: bytes | None, named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4, "max_position_embeddings": 8}))
    text = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    ModelFolder(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=named):
        ModelFolder(tmp_path)


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0])
    u = (np.arange(20000) + 0.5) / 20000
    rows = np.broadcast_to(logits, (len(u), 4))
    tokens, reported = draw_plain(rows, np.full(len(u), 0.7), np.zeros(len(u), bool), u)
    expected = np.exp(log_softmax(logits / 0.7))
    np.testing.assert_allclose(np.bincount(tokens) / len(u), expected, atol=1e-4)
    np.testing.assert_allclose(np.exp(reported), np.broadcast_to(expected, reported.shape))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-5, 5), min_size=5, max_size=12),
    st.integers(-1, 6),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.9),
    st.floats(0.0, 0.999),
)
def test_a_truncated_distribution_is_renormalised_and_holds_what_is_drawn(
    logits: list[float], top_k: int, top_p: float, min_p: float, u: float
) -> None:
    s = Sampling(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    x = np.array(logits)
    token, reported, drawn_from = draw_shaped(x, s, LogprobMode.SAMPLING, u, prompt=PROMPT, output=[], forbidden=())
    kept = truncated(x / 0.8, s)
    assert np.isfinite(kept[token])
    assert np.isfinite(kept).sum() >= 1
    if 0 < top_k < len(x) and len(set(logits)) == len(logits):
        assert np.isfinite(kept).sum() <= top_k
    assert reported.tolist() == drawn_from.tolist() == log_softmax(kept).tolist()
    raw = draw_shaped(x, s, LogprobMode.RAW, u, prompt=PROMPT, output=[], forbidden=())
    assert (raw.token, raw.logprobs_V.tolist()) == (token, log_softmax(x).tolist())


def test_penalties_follow_their_formulas() -> None:
    x = np.array([1.0, -1.0, 2.0, 0.5])
    s = Sampling(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 1.0})
    out = penalised(x, s, prompt=np.array([1]), output=[2, 2])
    np.testing.assert_allclose(out, [1.0, -2.0, 2.0 / 2 - 0.5 * 2 - 0.25, 1.5])
