"""What a model folder says about itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file
from serve_process import TINY_MODEL
from skyrl_arctic_inference.engine.identity import ModelFolderError, canonical, end_tokens, read_model_folder
from skyrl_rollout.weights.manifest import TensorLayout


def folder(path: Path, tensors: dict[str, np.ndarray], **config) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_layout_comes_from_the_headers_sorted_and_in_the_served_dtype(tmp_path: Path):
    tensors = {"b.weight": np.zeros((2, 3), np.float32), "a.counts": np.zeros(4, np.int64)}
    model = read_model_folder(folder(tmp_path, tensors))
    assert model.layout("bf16") == (TensorLayout("a.counts", "i64", (4,)), TensorLayout("b.weight", "bf16", (2, 3)))


def test_shards_are_read_together(tmp_path: Path):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"y": np.zeros(1, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert [t.name for t in read_model_folder(tmp_path).tensors] == ["x", "y"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_counts_once(tied):
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.rotary_emb.inv_freq"]
    kept = canonical([TensorLayout(n, "f32", (2, 2)) for n in names], tied=tied)
    assert [t.name for t in kept] == (names[1:2] if tied else names[:2])


def test_end_tokens_of_both_files_count_once_in_order():
    assert end_tokens([{"eos_token_id": 7}, {"eos_token_id": [9, 7]}, {"eos_token_id": None}]) == (7, 9)
    assert end_tokens([{}, {}]) == ()


def test_the_tiny_model_is_read_as_it_is():
    model = read_model_folder(TINY_MODEL)
    assert model.architectures == ("Qwen3ForCausalLM",) and model.eos_token_ids == (2,) and model.has_tokenizer
    assert model.tokenizer_digest == xxhash.xxh3_128_hexdigest((TINY_MODEL / "tokenizer.json").read_bytes())
    assert not any(t.name == "lm_head.weight" for t in model.tensors)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no config.json"),
        ({"config.json": "{"}, "is not JSON"),
        ({"config.json": "[]"}, "holds a list"),
        ({"config.json": "{}"}, r"no \*\.safetensors"),
        ({"config.json": "{}", "model.safetensors": "not one"}, "is not a safetensors file"),
        ({"config.json": "{}", "model.safetensors": ""}, "is not a safetensors file"),
    ],
)
def test_a_folder_that_cannot_be_served_says_what_is_missing(tmp_path: Path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelFolderError, match=said):
        read_model_folder(tmp_path)
