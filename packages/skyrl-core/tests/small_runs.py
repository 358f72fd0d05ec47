"""Whole small runs in this process: what they trained on, step by step, and the metrics that they left."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import skyrl.train.quickstart
from skyrl.train import backends, environments
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generator.trajectory import Trajectory
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

# Every backend that is installed; another one than the core's own takes seconds to import.
BACKENDS = [
    pytest.param(name, marks=() if name == backends.DEFAULT else pytest.mark.ci) for name in backends.installed()
]
QUICKSTART = Path(skyrl.train.quickstart.__file__).parent


class CodesEnv(BaseTextEnv):
    """The share of even character codes in an answer; 3 for prompts that begin with 1. `held` are prompts of which the
    first sample is answered once `released` is set; every answer to an `unscored` prompt, or if `broken`, is an error.
    """

    held: set[str] = set()
    released = threading.Event()
    broken = False
    unscored: set[str] = set()

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.max_turns, self.turns = (extras or {}).get("max_turns", 1), 0

    def init(self, prompt: Any) -> Any:
        self.prompt = prompt[-1]["content"]
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.broken or self.prompt in self.unscored:
            raise RuntimeError("the judge is away")
        if self.prompt in self.held:
            self.released.wait(60)
            self.held.discard(self.prompt)
        self.turns += 1
        even = sum(ord(c) % 2 == 0 for c in action) / max(len(action), 1)
        reward = 3.0 if self.prompt.startswith("1") else even
        done = self.turns == self.max_turns
        observations = [] if done else [{"role": "user", "content": f"<{self.turns}>"}]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})


environments.register("codes_of_a_test", CodesEnv)


@dataclass
class Ran:
    """rows: metrics of each step; batches: what each step trained on; weights: the policy's at the end."""

    rows: list[dict[str, float]] = field(default_factory=list)
    batches: list[list[Trajectory]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    trainer: Any = None

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]

    def uids(self) -> list[list[str]]:
        """The prompts of each step, in order."""
        return [list(dict.fromkeys(t.id.uid for t in batch)) for batch in self.batches]


def arguments(url: str, *overrides: str) -> list[str]:
    """Of a run over a running server, 8 prompts a step with 2 samples each."""
    return [
        f"@{QUICKSTART / 'embedded.yaml'}", f"generator.inference_engine.external_server_urls={url}",
        "environment.env_class=codes_of_a_test", "generator.n_samples_per_prompt=2", "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8", "trainer.max_training_steps=3", "trainer.eval_before_train=false",
        "trainer.eval_interval=0", "trainer.ckpt_interval=0", "trainer.hf_save_interval=0", "trainer.logger=jsonl",
        "trainer.progress=false", "trainer.device=cpu", *overrides,
    ]  # fmt: skip


def run(argv: Sequence[str], *, on_step: Any = None, trainer: type | None = None) -> Ran:
    """Runs in the present folder; on_step(step) is called after each publish of a step; `trainer` changes what a user's
    own trainer may change."""
    ran = Ran()
    cfg, plugin = backends.resolve(argv, announce=lambda line: None)

    own = () if trainer is None else (trainer,)

    class Recording(*own, backends.import_attribute(plugin.trainer_cls)):  # type: ignore[misc]
        def batch_of(self, trajectories: Sequence[Trajectory]) -> Any:
            ran.batches.append(list(trajectories))
            return super().batch_of(trajectories)

        async def publish(self, *, step: int) -> None:
            await super().publish(step=step)
            if on_step is not None:
                on_step(step)

        async def train(self) -> Any:
            ran.trainer = self
            try:
                return await super().train()
            finally:
                ran.weights = self.policy.weights()

    class Exp(BasePPOExp):
        def get_trainer(self, **parts: Any) -> Any:
            return Recording(self.cfg, **parts)

    Exp(cfg, plugin).run()
    log = cfg.trainer.log_folder / "metrics.jsonl"
    ran.rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    return ran


def trained(ran: Ran) -> list[dict[str, float]]:
    """The rows of training steps."""
    return [row for row in ran.rows if "reward/avg_raw_reward" in row]
