"""`--check`: what a run would be, with nothing started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import skyrl.train.quickstart
from skyrl.train import backends
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import ConfigError
from skyrl.train.display import check, memory
from skyrl.train.entrypoints import main_base

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent
TINY = str(QUICKSTART / "tiny_model")


def lines(*argv: str) -> list[str]:
    return main_base.check_for([*argv, "trainer.device=cpu"], {})


@pytest.mark.ci
def test_it_reports_and_starts_nothing(tmp_path: Path) -> None:
    """As a user types it: exit code 0, no folder, no file."""
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", f"@{QUICKSTART / 'embedded.yaml'}", "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "nothing was started"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_would_be_refused_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.sed: unknown key; did you mean trainer\.seed\?"):
        lines("trainer.sed=1")


def test_the_configuration_that_it_prints_builds_the_same_run(tmp_path: Path) -> None:
    found = lines("trainer.seed=7", f"trainer.policy.model.path={TINY}")
    end = next(i for i, line in enumerate(found[1:], 1) if not line.startswith(" "))
    (tmp_path / "run.yaml").write_text("\n".join(line[2:] for line in found[1:end]))
    cfg = backends.resolve([f"@{tmp_path / 'run.yaml'}"], announce=lambda line: None)[0]
    assert (cfg.trainer.seed, cfg.trainer.policy.model.path) == (7, TINY)


def test_keys_that_differ_from_their_defaults_are_listed_with_both() -> None:
    found = lines("trainer.seed=7", "trainer.epochs=1")
    assert "  trainer.seed: 7 (default 42)" in found
    assert not any(line.startswith("  trainer.epochs: ") and "default" in line for line in found)


def test_it_says_what_becomes_of_each_key() -> None:
    found = lines("trainer.seed=7", "trainer.policy.use_torch_compile=true", "generator.batched=true")
    assert any("2 mapped" in line or "1 mapped" in line for line in found)
    assert any("unused: trainer.policy.use_torch_compile" in line for line in found)


def test_the_arithmetic_of_batches(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 37}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"prompt": "x"}) for _ in range(3)))
    cfg = build(
        backends.resolve([])[0].__class__,
        parse(
            [
                f"data.train_data=['{tmp_path}/a.parquet','{tmp_path}/b.jsonl']", "trainer.train_batch_size=8",
                "trainer.policy_mini_batch_size=4", "generator.n_samples_per_prompt=5", "trainer.epochs=3",
                "trainer.update_epochs_per_batch=2", "trainer.micro_train_batch_size_per_gpu=3",
                "trainer.placement.policy_num_gpus_per_node=2", "trainer.max_training_steps=11",
            ]
        ),
    ).cfg  # fmt: skip
    assert list(check.batches(cfg)) == [
        "a step: 8 prompts x 5 = 40 samples",
        "its update: 2 mini-batches of 4 prompts = 20 samples, 2 times: 4 optimizer steps",
        "a mini-batch on 2 workers: at most 10 samples each, in 4 micro-batches of at most 3",
        "a sample: at most 1536 tokens",
        "an epoch: 40 rows, 5 steps (fewer where prompts are longer than 512 tokens)",
        "the run: 11 steps",
    ]


def test_prompts_that_are_not_here_leave_the_steps_unknown() -> None:
    assert any(line.startswith("  steps per epoch: unknown") for line in lines("data.train_data=['/nowhere.parquet']"))


def test_what_would_stop_a_run_here_is_told(tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "x"}\n' * 3)
    batch = ("trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8")
    found = lines(f"data.train_data={few}", f"data.val_data={tmp_path}/no.jsonl", "environment.env_class=gsm9k", *batch)
    stops = found[found.index("what a run on this machine would stop at") + 1 : -1]
    assert stops[0] == f"  data.val_data: no such file: {tmp_path}/no.jsonl"
    assert stops[1] == "  data.train_data has 3 rows, trainer.train_batch_size=8 needs at least as many"
    assert stops[2].startswith("  environment.env_class: unknown environment 'gsm9k'") and len(stops) == 3


def test_a_run_that_could_start_here_is_told_nothing_of_the_kind() -> None:
    assert "what a run on this machine would stop at" not in lines(f"@{QUICKSTART / 'embedded.yaml'}")


def test_epochs_that_end_before_the_limit_of_steps_are_told() -> None:
    found = lines(f"@{QUICKSTART / 'embedded.yaml'}", "trainer.max_training_steps=200")
    assert "  the run: 112 steps, where trainer.epochs=4 end" in found


def test_a_model_that_is_not_here_has_no_estimate() -> None:
    found = lines("trainer.policy.model.path=owner/name", "trainer.algorithm.use_kl_loss=false")
    assert f"  a policy worker: {check.UNKNOWN}" in found and f"  a server: {check.UNKNOWN}" in found


def test_the_size_of_a_model_is_that_of_its_weights() -> None:
    from transformers import AutoModelForCausalLM

    size = memory.model_size(TINY)
    assert size is not None
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert size.num_params == sum(p.numel() for p in model.parameters())
    text = model.config
    assert size.kv_elements == 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim


def test_state_is_divided_among_the_workers_that_share_it() -> None:
    size = memory.ModelSize(num_params=1000, num_layers=2, hidden=8, vocabulary=16, kv_elements=64)
    cfg = backends.resolve(
        ["trainer.placement.policy_num_gpus_per_node=4", "trainer.policy.fsdp_config.fsdp_size=2"],
        announce=lambda line: None,
    )[0]
    assert memory.sharded_state(cfg, "policy", size) == {"weights": 2000, "gradients": 2000, "optimizer": 4000}
    assert memory.sharded_state(cfg, "ref", size) == {"weights": 1000}


def test_a_micro_batch_and_a_server_have_their_sums() -> None:
    size = memory.ModelSize(num_params=1000, num_layers=2, hidden=8, vocabulary=16, kv_elements=64)
    cfg = backends.resolve(
        ["trainer.max_prompt_length=10", "generator.sampling_params.max_generate_length=5",
         "trainer.micro_train_batch_size_per_gpu=2", "generator.inference_engine.max_num_seqs=3",
         "generator.inference_engine.tensor_parallel_size=2"],
        announce=lambda line: None,
    )[0]  # fmt: skip
    assert memory.activations(cfg, size, compute_bytes=2, trained=True) == {
        "activations": 30 * 8 * 2 * (2 + 16),
        "logits": 30 * 16 * 2 + 2 * 30 * 16 * 4,
    }
    assert memory.server(cfg, size, "bfloat16") == {"weights": 1000, "kv cache": 64 * 2 * 15 * 3 / 2}
