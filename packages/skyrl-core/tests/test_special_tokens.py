"""A tokenizer without a token for padding or for the end: a run needs neither, and says where answers cannot end."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import skyrl.train.quickstart
from skyrl.train import backends
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_rollout.reference.process import ReferenceServer
from transformers import AutoTokenizer

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent


@pytest.fixture
def bare_model(tmp_path: Path) -> Path:
    """The tiny model without any word of padding or of an end."""
    folder = Path(shutil.copytree(QUICKSTART / "tiny_model", tmp_path / "model"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            kept = json.loads((folder / name).read_text())
            kept = {key: value for key, value in kept.items() if not key.startswith(("eos_token", "pad_token"))}
            (folder / name).write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("stop", [None, ["="]])
def test_a_tokenizer_without_pad_and_eos_trains_and_the_missing_end_is_told(
    bare_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stop: list[str] | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    with ReferenceServer("--model", str(bare_model)) as server:
        cfg, plugin = backends.resolve(
            [
                f"@{QUICKSTART / 'embedded.yaml'}", f"generator.inference_engine.external_server_urls=[{server.url}]",
                f"trainer.policy.model.path={bare_model}", "generator.n_samples_per_prompt=2", "trainer.device=cpu",
                "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "trainer.max_training_steps=1",
                "trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.logger=jsonl",
                "trainer.hf_save_interval=1", "trainer.progress=false",
                f"generator.sampling_params.stop={json.dumps(stop)}",
            ],
            announce=lambda line: None,
        )  # fmt: skip
        exp = BasePPOExp(cfg, plugin)
        tokenizer = exp.get_tokenizer()
        assert tokenizer.eos_token is None and tokenizer.pad_token is None
        with caplog.at_level(logging.WARNING, logger="skyrl"):
            exp.run()
    told = "names no end-of-sequence token, so that every answer has the full generator.sampling_params."
    assert (told in caplog.text) is (stop is None)
    export = Path(cfg.trainer.export_path) / "global_step_1" / "policy"
    assert AutoTokenizer.from_pretrained(export)("47+8=")["input_ids"] == tokenizer("47+8=")["input_ids"]
