"""What ZeRO's stages leave in one worker."""

from __future__ import annotations

import pytest
from arctic_rl.memory import state_memory
from skyrl.train import backends
from skyrl.train.display.memory import ModelSize

SIZE = ModelSize(num_params=1000, num_layers=1, hidden=1, vocabulary=1, kv_elements=1)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (("zero_stage=0",), {"weights": 4000, "gradients": 4000, "optimizer": 8000}),
        (("zero_stage=1",), {"weights": 4000, "gradients": 4000, "optimizer": 4000}),
        (("zero_stage=2",), {"weights": 4000, "gradients": 2000, "optimizer": 4000}),
        (("zero_stage=3",), {"weights": 2000, "gradients": 2000, "optimizer": 4000}),
        (
            ("zero_stage=3", "offload_optimizer=true"),
            {"weights": 2000, "gradients": 2000, "optimizer in host memory": 4000},
        ),
    ],
)
def test_each_stage_divides_one_thing_more(written: tuple[str, ...], expected: dict[str, float]) -> None:
    argv = ["trainer.backend=arctic_rl", "trainer.device=cpu", "trainer.placement.policy_num_gpus_per_node=2"]
    cfg, plugin = backends.resolve([*argv, *(f"trainer.arctic_rl.{w}" for w in written)], announce=lambda line: None)
    assert plugin.state_memory is state_memory
    assert state_memory(cfg, "policy", SIZE) == expected
    assert state_memory(cfg, "ref", SIZE) == {"weights": 2000}
