"""An adapter that was trained here, published to a transformers server: it says what PEFT says, token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.contract_suite import random_minibatch, scored, spec
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.group import PolicyGroup
from skyrl.train.rollouts.service import RolloutService
from skyrl_rollout.tokens import LogprobMode, Sampling
from transformers import AutoModelForCausalLM

NUM_TOKENS = 16


@pytest.fixture
def policy(server, teacher, tmp_path):
    lora = {"rank": 4, "alpha": 8}
    trainer = {
        "device": "cpu",
        "policy": {"model": {"path": str(teacher.folder), "lora": lora}, "optimizer_config": {"lr": 3e-2}},
    }
    engine = {"external_server_urls": [server.url]}
    cfg = SkyRLTrainConfig.model_validate({"trainer": trainer, "generator": {"inference_engine": engine}})
    group = PolicyGroup.create(cfg, PLUGIN, "policy", total_steps=10)
    yield group, cfg
    group.close()


@pytest.mark.ci
async def test_the_server_says_what_peft_says_before_and_after_updates(policy, teacher, tmp_path: Path) -> None:
    group, cfg = policy
    service = await RolloutService.open(cfg, teacher.folder)
    prompts, said = teacher.prompts(6, longest=20), []
    for step in (0, 1):
        await service.publish(group, step=step)
        await asyncio.to_thread(group.save_hf, tmp_path / str(step))
        base = AutoModelForCausalLM.from_pretrained(teacher.folder, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, tmp_path / str(step) / "lora_adapter").eval()
        adapted.generation_config.eos_token_id = None
        said.append([])
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made = adapted.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
            )[0, len(prompt) :]
            generation = await service.pool.generate(
                np.array(prompt), Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
                mode=LogprobMode.RAW, timeout_s=30,
            )  # fmt: skip
            (sample,) = generation.samples
            assert sample.token_ids.tolist() == made.tolist()
            with torch.no_grad():
                logits = adapted(torch.tensor([[*prompt, *made.tolist()]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, made[:, None])[:, 0].numpy()
            assert np.abs(sample.logprobs - expected).max() < 2e-5
            said[-1].append(made.tolist())
        for i in range(3):
            await asyncio.to_thread(group.update, scored(random_minibatch(i)), spec(cfg))
    assert said[0] != said[1]
    assert said[0] == [teacher.generate(prompt, NUM_TOKENS) for prompt in prompts], "at first B is 0: the base"
    await service.close()
