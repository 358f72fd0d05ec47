"""The Hugging Face export of either backend: what is in it, and that a run with it as its model starts from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from arctic_rl.config import ArcticSkyRLConfig
from arctic_rl.entrypoint import PLUGIN as ARCTIC
from safetensors.torch import load_file
from skyrl.train.policy import contract_suite as suite
from skyrl.train.policy import hf_files
from skyrl.train.policy.fsdp.plugin import PLUGIN as FSDP
from skyrl.train.policy.group import PolicyGroup
from transformers import AutoModelForCausalLM

GENERATION = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "pad_token_id": 3}
BACKENDS = {"fsdp": (FSDP, {}), "zero3": (ARCTIC, {"zero_stage": 3})}


@pytest.fixture(params=list(BACKENDS))
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[PolicyGroup, Any]]]:
    plugin, arctic = BACKENDS[request.param]
    started: list[PolicyGroup] = []

    def start(model: Path, **policy: Any) -> tuple[PolicyGroup, Any]:
        tree = {"device": "cpu", "policy": {"model": {"path": str(model)}} | policy, "arctic_rl": arctic}
        cfg = ArcticSkyRLConfig.model_validate({"trainer": tree})
        started.append(PolicyGroup.create(cfg, plugin, "policy", total_steps=4))
        return started[-1], cfg

    yield start
    for group in started:
        group.close()


@pytest.mark.ci
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_of_several_files_is_the_trained_model(
    start: Any, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_files, "SHARD_SIZE", "100KB")
    model, folder = suite.tiny_model(tmp_path / "model", tied=tied), tmp_path / "export"
    (model / "generation_config.json").write_text(json.dumps(GENERATION))
    group, cfg = start(model)
    group.update(suite.scored(suite.random_minibatch(1)), suite.spec(cfg))
    group.save_hf(folder)
    trained = group.weights()
    index = json.loads((folder / hf_files.INDEX).read_text())["weight_map"]
    files = {path.name for path in folder.glob("*.safetensors")}
    assert len(files) > 2 and set(index.values()) == files
    stored = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert set(index) == set(stored) and ("lm_head.weight" in stored) is not tied
    suite.assert_identical(stored, trained)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    suite.assert_identical(dict(loaded.named_parameters()), trained)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    kept = json.loads((folder / "generation_config.json").read_text())
    assert {name: kept[name] for name in GENERATION} == GENERATION
    again, _ = start(folder)
    suite.assert_identical(again.weights(), trained)


def test_an_export_has_the_precision_that_was_trained(start: Any, tmp_path: Path) -> None:
    model = suite.tiny_model(tmp_path / "model")
    group, _ = start(model, model_config_kwargs={"dtype": "bfloat16"})
    group.save_hf(tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "export/model.safetensors").values()} == {torch.bfloat16}
