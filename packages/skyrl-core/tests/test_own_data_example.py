"""Whether the example of data and an environment of one's own runs as it stands in the folder."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_data.py"


@pytest.mark.ci
def test_an_own_environment_and_own_rows_train_through_the_plain_entrypoint(tmp_path):
    overrides = ["generator.inference_engine.backend=reference", "trainer.max_training_steps=2"]
    run = subprocess.run(
        [sys.executable, EXAMPLE, *overrides], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "trainer/global_step: 2" in run.stdout
