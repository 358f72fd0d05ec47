"""Whether `environment.on_error=drop` costs exactly the samples that could not be scored, names and counts them."""

import re
import threading

import pytest
from skyrl.train import environments
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.environments import EnvironmentFailed
from skyrl.train.failures import RunFailed
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.generator.trajectory import PromptTask
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_rollout.pool import RolloutPool

HELD = threading.Event()


class FaultyEnv(BaseTextEnv):
    """Fails as its row says, on the second turn; the samples of a prompt fail in turns."""

    seen: dict[str, int] = {}

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.fault = extras["fault"]
        number = FaultyEnv.seen[self.fault] = FaultyEnv.seen.get(self.fault, -1) + 1
        self.fails = self.fault == "always" or self.fault and number % 2 == 0
        self.turns = 0
        self.closed = False
        if self.fault == "start" and self.fails:
            raise ValueError("no such database")

    def step(self, action):
        self.turns += 1
        if self.fails and self.turns == 2:
            if self.fault == "hang":
                HELD.wait(20)
            raise RuntimeError("the judge is away")
        more = [{"role": "user", "content": "+"}] if self.turns < 2 else []
        return BaseTextEnvStepOutput(observations=more, reward=1.0, done=not more, metadata={})


environments.register("faulty", FaultyEnv)


def config(on_error: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.model_validate(
        {
            "environment": {"on_error": on_error, "step_timeout_s": 0.3, "skyrl_gym": {"max_env_workers": 4}},
            "generator": {"max_turns": 2, "max_input_length": 60, "sampling_params": {"max_generate_length": 3}},
        }
    )


def task(uid: str, fault: str) -> PromptTask:
    return PromptTask(uid, [{"role": "user", "content": f"{uid}+1="}], "faulty", {"fault": fault})


@pytest.fixture
async def generator(reference_url, tiny_tokenizer):
    FaultyEnv.seen.clear()
    HELD.clear()
    async with await RolloutPool.connect([reference_url]) as pool:
        yield lambda on_error: EnvGenerator(config(on_error), tiny_tokenizer, pool)
    HELD.set()


async def generate(generator: EnvGenerator, *tasks: PromptTask, n: int = 4):
    seen = []
    trajectories = await generator.generate(
        tasks,
        n_samples=n,
        sampling=generator.train_sampling,
        step=1,
        phase="train",
        on_progress=lambda done, total: seen.append((done, total)),
    )
    return trajectories, seen


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", r"environment 'faulty' on prompt 5, sample \d, turn 2 raised RuntimeError: the judge is away"),
        ("hang", r"environment 'faulty' on prompt 5, sample \d, turn 2 did not answer within 0.3 s"),
        ("start", r"environment 'faulty' at the start of prompt 5, sample \d raised ValueError: no such database"),
    ],
)
async def test_the_samples_that_fail_are_left_out_named_and_counted(generator, caplog, fault, told):
    dropping = generator("drop")
    whole, _ = await generate(dropping, task("4", ""), task("5", ""))
    kept, seen = await generate(dropping, task("4", ""), task("5", fault))
    assert [t.id.uid for t in kept] == ["4"] * 4 + ["5"] * 2
    first_turns = {t.id: t.response_token_ids[: t.turn_num_tokens[0]].tolist() for t in whole}
    for t in kept:
        if t.id.uid == "4" or fault != "start":  # a group that begins with fewer samples draws others
            assert t.response_token_ids[: t.turn_num_tokens[0]].tolist() == first_turns[t.id]
    assert len([r for r in caplog.records if "a sample is left out" in r.message]) == 2
    assert re.search(told, caplog.text)
    assert seen == [(done, 8) for done in range(1, 9)]
    assert dropping.metrics("train") == {"generate/num_dropped_samples": 2.0}
    assert dropping.metrics("train") == {"generate/num_dropped_samples": 0.0}


async def test_without_the_key_the_first_failure_ends_the_call(generator):
    stopping = generator("stop")
    with pytest.raises(EnvironmentFailed, match="prompt 5"):
        await generate(stopping, task("4", ""), task("5", "raise"))
    assert stopping.metrics("train") == {}


async def test_where_no_sample_is_left_the_run_ends_with_the_first_reason(generator):
    with pytest.raises(RunFailed, match=r"all 2 samples were left out \(environment.on_error=drop\), .* the judge is"):
        await generate(generator("drop"), task("5", "always"), n=2)


async def test_a_step_that_is_reported_meanwhile_takes_no_reason_away(generator):
    dropping, counted = generator("drop"), []
    with pytest.raises(RunFailed, match=r"all 2 samples were left out .* the judge is away"):
        await dropping.generate(
            [task("5", "always")], n_samples=2, sampling=dropping.train_sampling, step=1, phase="train",
            on_progress=lambda done, total: counted.append(dropping.metrics("train")),
        )  # fmt: skip
    assert counted == [{"generate/num_dropped_samples": 1.0}] * 2


async def test_a_begin_that_is_longer_than_the_context_is_named(generator, monkeypatch):
    monkeypatch.setattr(FaultyEnv, "init", lambda self, prompt: ([{"role": "user", "content": "x" * 61}], {}))
    with pytest.raises(EnvironmentFailed, match=r"began prompt 4, sample \d with 61 tokens, more than .*length=60"):
        await generate(generator("stop"), task("4", ""))
