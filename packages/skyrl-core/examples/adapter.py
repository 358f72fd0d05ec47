"""Trains a LoRA adapter on the arithmetic of the quickstart and says where it is: no GPU, no account, no download.

    uv run --package skyrl-core python packages/skyrl-core/examples/adapter.py [key=value ...]

Rollouts come from `skyrl-serve`, which takes adapters as it is. The export holds the merged model, and the adapter by
itself in `lora_adapter/`:

    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "<export>/lora_adapter")
"""

from __future__ import annotations

import sys
from pathlib import Path

import skyrl.train.quickstart
from skyrl.train.entrypoints.main_base import main

EMBEDDED = Path(skyrl.train.quickstart.__file__).parent / "embedded.yaml"

if __name__ == "__main__":
    main(
        [
            f"@{EMBEDDED}",
            "trainer.run_name=adapter",
            "trainer.policy.model.lora.rank=16",
            "trainer.policy.model.lora.alpha=32",
            "trainer.policy.optimizer_config.lr=3e-3",  # ten times the rate of all weights
            "trainer.max_training_steps=60",
            "generator.inference_engine.backend=transformers",
            *sys.argv[1:],
        ]
    )
