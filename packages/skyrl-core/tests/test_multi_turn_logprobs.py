"""Whether the tokens of a multi-turn trajectory are, one by one, those that a real engine saw: a trainer's forward pass
over the trajectory gives the logprobs that the engine reported while it sampled turn after turn."""

from pathlib import Path

import numpy as np
import pytest
import skyrl.train.quickstart
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.generator.trajectory import PromptTask, Trajectory
from skyrl.train.rollouts.service import RolloutService
from transformers import AutoModelForCausalLM

TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"


def config(tmp_path: Path) -> SkyRLTrainConfig:
    engine = {"backend": "vllm", "enforce_eager": True, "engine_init_kwargs": {"max_model_len": 512}}
    return SkyRLTrainConfig.model_validate(
        {
            "trainer": {"log_path": str(tmp_path), "device": "cpu"},
            "generator": {
                "max_turns": 3,
                "max_input_length": 500,
                "sampling_params": {"max_generate_length": 6, "temperature": 0.7},
                "inference_engine": engine,
            },
        }
    )


def trainer_logprobs(model: torch.nn.Module, t: Trajectory, temperature: float) -> np.ndarray:
    """float32 [R]: log_softmax(logits / temperature) of every response token."""
    ids = torch.tensor(np.concatenate([t.prompt_token_ids, t.response_token_ids])[None], dtype=torch.int64)
    with torch.no_grad():
        logits = model(ids).logits[0, len(t.prompt_token_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(t.prompt_token_ids) :, None])[:, 0].numpy()


@pytest.mark.ci
@pytest.mark.timeout(600)
async def test_a_forward_pass_over_the_trajectory_gives_the_engines_logprobs(tmp_path, tiny_tokenizer, chat_tokenizer):
    cfg = config(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    tasks = [
        PromptTask(
            str(i),
            [{"role": "user", "content": f"{i}2+3="}],
            "gsm8k_multi_turn",
            {"reward_spec": {"ground_truth": "0"}},
        )
        for i in range(4)
    ]
    service = await RolloutService.open(cfg, TINY_MODEL)
    try:
        for tokenizer in (tiny_tokenizer, chat_tokenizer):
            generator = EnvGenerator(cfg, tokenizer, service.pool)
            trajectories = await generator.generate(
                tasks, n_samples=2, sampling=generator.train_sampling, step=1, phase="train"
            )
            assert {t.num_turns for t in trajectories} == {3}
            for t in trajectories:
                gap = np.abs(trainer_logprobs(model, t, 0.7) - t.rollout_logprobs)[t.loss_mask > 0]
                assert gap.max() < 1e-4
                assert gap.mean() < 5e-6
    finally:
        await service.close()
