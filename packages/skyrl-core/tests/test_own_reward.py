"""Whether a plain function of the user's scores every response, and whatever is wrong with it is told at start."""

import pytest
from skyrl.train import environments
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.problems import ConfigError
from skyrl.train.config.validation import own_modules
from skyrl.train.data.prompts import PromptDataset
from skyrl.train.environments import EnvironmentFailed, EnvironmentThreads, Episode
from skyrl.train.plugins import reward_function

SOURCE = """
def score(prompt, response, extras):
    return len(response) / len(prompt[0]["content"]) + extras["bonus"]

def parts(prompt, response, extras):
    return {"reward": 0.5, "words": len(response.split())}

async def later(prompt, response, extras): return 1.0
def short(prompt, response): return 1.0
def text(prompt, response, extras): return "good"
def nan(prompt, response, extras): return float("nan")
def fails(prompt, response, extras): raise KeyError("bonus")
number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    """The user's file lies in the folder of the run and nowhere else."""
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


async def episode(name: str, **extras) -> Episode:
    env_class = environments.use_reward(f"my_rewards:{name}")
    started, messages = await Episode.start(
        env_class,
        [{"role": "user", "content": "1+1="}],
        where="prompt 7, sample 1",
        env_config={},
        extras={"max_turns": 1, **extras},
        threads=EnvironmentThreads(1),
        timeout_s=5,
    )
    assert messages == [{"role": "user", "content": "1+1="}]
    return started


async def test_it_gets_prompt_response_and_the_rows_other_columns():
    step = await (await episode("score", bonus=2.0)).step("12")
    assert (step.reward, step.done) == (2.5, True)


async def test_a_mapping_gives_the_reward_and_numbers_to_average():
    scored = await episode("parts")
    assert (await scored.step("a b c")).reward == 0.5
    assert await scored.finish() == {"words": 3}
    assert environments.aggregate_metrics("my_rewards:parts", [{"words": 3}, {"words": 5}]) == {"words": 4.0}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nan", "returned the reward nan"),
        ("fails", "raised KeyError: 'bonus' .*my_rewards.py"),
        ("text", "it returned 'good': expected a number, or a mapping with one under 'reward'"),
    ],
)
async def test_what_it_gets_wrong_names_function_sample_and_turn(name, told):
    with pytest.raises(EnvironmentFailed, match=f"'my_rewards:{name}' on prompt 7, sample 1, turn 1 .*{told}"):
        await (await episode(name)).step("x")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("my_rewards", "environment.reward=my_rewards: expected module:function"),
        ("my_rewardz:score", "environment.reward: cannot import 'my_rewardz' .*a module in this folder"),
        ("my_rewards:scroe", "module 'my_rewards' has no 'scroe'"),
        ("my_rewards:number", "expected a plain function"),
        ("my_rewards:later", "expected a plain function"),
        ("my_rewards:short", r"it must take score\(prompt, response, extras\)"),
    ],
)
def test_what_is_no_reward_function_is_refused(path, told):
    with pytest.raises(ValueError, match=told):
        reward_function(path)
    cfg = SkyRLTrainConfig.model_validate({"environment": {"reward": path}})
    assert [str(ConfigError([problem])) for problem in own_modules(cfg)]


def test_it_scores_one_turn_only():
    cfg = SkyRLTrainConfig.model_validate(
        {"environment": {"reward": "my_rewards:score"}, "generator": {"max_turns": 2, "max_input_length": 600}}
    )
    assert [p for p in own_modules(cfg) if "environment.reward scores one turn, and generator.max_turns=2" in p]


def test_it_stands_for_the_environment_of_every_row(tiny_tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "1"}], "env_class": "gsm8k"}\n'
        '{"prompt": [{"role": "user", "content": "2"}]}\n'
    )
    cfg = SkyRLTrainConfig.model_validate(
        {"data": {"train_data": "rows.jsonl"}, "environment": {"reward": "my_rewards:score"}}
    )
    assert PromptDataset.from_config(cfg, tiny_tokenizer, "train").env_classes == {"my_rewards:score"}
