"""Where turns end and what follows them: stop strings, the closing token, one message or many, evaluation's own rules.

The reference server looks for stop strings in characters of its own, one per token (`reference.rows.text_of`).
"""

import numpy as np
import pytest
from skyrl.train import environments
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.generator.trajectory import PromptTask, Trajectory
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.reference.rows import text_of

TASK = PromptTask("3", [{"role": "user", "content": "12+3="}], "answers_ok", {})


class OkEnv(BaseTextEnv):
    """Answers the first turn with `ok` and ends with the second."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def step(self, action):
        self.turns += 1
        more = [{"role": "user", "content": "ok"}] if self.turns == 1 else []
        return BaseTextEnvStepOutput(observations=more, reward=1.0, done=not more, metadata={})


environments.register("answers_ok", OkEnv)


def config(**generator) -> SkyRLTrainConfig:
    sampling = {"max_generate_length": 6, "additional_kwargs": {"ignore_eos": True}}
    values = {"max_turns": 2, "max_input_length": 200, **generator}
    values["sampling_params"] = {**sampling, **values.get("sampling_params", {})}
    values["eval_sampling_params"] = {**sampling, **values.get("eval_sampling_params", {})}
    return SkyRLTrainConfig.model_validate({"trainer": {"seed": 1}, "generator": values})


@pytest.fixture
async def roll_out(reference_url, chat_tokenizer):
    async with await RolloutPool.connect([reference_url]) as pool:

        async def one(phase: str = "train", **generator) -> Trajectory:
            made = EnvGenerator(config(**generator), chat_tokenizer, pool)
            sampling = made.train_sampling if phase == "train" else made.eval_sampling
            (t,) = await made.generate([TASK], n_samples=1, sampling=sampling, step=1, phase=phase)
            return t

        yield one


def first_turn(t: Trajectory) -> list[int]:
    return t.response_token_ids[: t.turn_num_tokens[0]].tolist()


def between(t: Trajectory) -> np.ndarray:
    """What stands between the two turns, none of it sampled."""
    first, last = t.turn_num_tokens
    part = slice(first, len(t.response_token_ids) - last)
    assert not t.loss_mask[part].any() and t.loss_mask[:first].all() and t.loss_mask[part.stop :].all()
    return t.response_token_ids[part]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "<eos>\n<bos>user\nok<eos>\n<bos>assistant\n"),
        ({"append_eos_token_after_stop_str_in_multi_turn": False}, "\n<bos>user\nok<eos>\n<bos>assistant\n"),
        ({"use_conversation_multi_turn": False}, "ok"),
    ],
    ids=["closed", "left open", "one message"],
)
async def test_a_stop_string_ends_the_turn_with_its_last_token_and_then_follows(roll_out, chat_tokenizer, keys, text):
    whole = first_turn(await roll_out(**keys))
    stop = text_of(whole[2])
    end = [text_of(token) for token in whole].index(stop) + 1
    stopped = await roll_out(sampling_params={"stop": [stop]}, **keys)
    assert first_turn(stopped) == whole[:end]
    assert chat_tokenizer.decode(between(stopped)) == text


async def test_evaluation_stops_at_its_own_strings_and_training_at_its_own(roll_out):
    whole = first_turn(await roll_out("eval", eval_sampling_params={"temperature": 1.0}))
    stop = text_of(whole[2])
    keys = {"eval_sampling_params": {"stop": [stop], "temperature": 1.0}}
    end = [text_of(token) for token in whole].index(stop) + 1
    assert first_turn(await roll_out("eval", **keys)) == whole[:end]
    assert first_turn(await roll_out(**keys)) == first_turn(await roll_out())


async def test_the_public_switch_between_two_generators_changes_no_token(roll_out):
    one, other = await roll_out(batched=False), await roll_out(batched=True)
    assert one.response_token_ids.tolist() == other.response_token_ids.tolist()
    assert one.rewards.tolist() == other.rewards.tolist()
