"""Whether the example of LoRA runs as it stands in the folder and leaves what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "adapter.py"


@pytest.mark.ci
def test_an_adapter_is_trained_published_and_exported_by_the_example(tmp_path):
    overrides = [
        "trainer.max_training_steps=2", "trainer.hf_save_interval=2", "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8", "trainer.eval_before_train=false", "trainer.eval_interval=0",
        "trainer.logger=[console]",
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, EXAMPLE, *overrides], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "trainer/global_step: 2" in run.stdout
    (adapter,) = tmp_path.rglob("lora_adapter")
    assert {p.name for p in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (adapter.parent / "model.safetensors").is_file()
