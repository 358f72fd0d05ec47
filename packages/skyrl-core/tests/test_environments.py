"""Whether environments are found by name, run beside the event loop, and never fail silently."""

import asyncio
import math
import sys
import threading
import time
from pathlib import Path

import pytest
import skyrl.train.quickstart
from skyrl.train import backends, environments
from skyrl.train.config.problems import ConfigError
from skyrl.train.environments import EnvironmentFailed, EnvironmentsStuck, EnvironmentThreads, Episode, stepping
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class ScriptedEnv(BaseTextEnv):
    """Does what the answer says."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.extras = extras
        self.closed = False

    def step(self, action):
        if action == "raise":
            raise KeyError("ground_truth")
        if action == "time out":
            raise TimeoutError("the judge is away")
        if action == "hang":
            time.sleep(5)
        if action == "exit":
            sys.exit(0)
        if action == "huge":
            return BaseTextEnvStepOutput(observations=[], reward=1e300, done=True, metadata={})
        if action == "nothing":
            return None
        reward = float("nan") if action == "nan" else 0.5
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    def get_metrics(self):
        return {"turns": 1, "note": "text", "max_turns": self.extras["max_turns"]}


environments.register("scripted", ScriptedEnv)


async def start(threads: EnvironmentThreads, *, timeout_s: float = 5.0, env_class: str = "scripted") -> Episode:
    episode, _ = await Episode.start(
        env_class,
        [{"role": "user", "content": "1+1="}],
        where="prompt 12, sample 3",
        env_config={},
        extras={"max_turns": 2},
        threads=threads,
        timeout_s=timeout_s,
    )
    return episode


@pytest.fixture
async def threads():
    return EnvironmentThreads(4)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("raise", r"environment 'scripted' on prompt 12, sample 3, turn 1 raised KeyError: 'ground_truth'"),
        ("time out", "turn 1 raised TimeoutError: the judge is away"),
        ("raise", r"test_environments\.py:\d+\)"),
        ("exit", r"turn 1 raised RuntimeError: SystemExit\(0\)"),
        ("nan", "prompt 12, sample 3, turn 1 returned the reward nan: a reward must be a finite float32 number"),
        ("huge", r"turn 1 returned the reward 1e\+300: a reward must be a finite float32 number"),
        ("nothing", "turn 1 returned None: expected observations, a number as reward"),
    ],
)
async def test_a_scoring_error_names_the_environment_and_the_sample(threads, action, expected):
    episode = await start(threads)
    with pytest.raises(EnvironmentFailed, match=expected):
        await episode.step(action)


async def test_an_environment_that_hangs_is_given_up_at_its_deadline(threads):
    episode = await start(threads, timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(EnvironmentFailed, match=r"prompt 12, sample 3, turn 1 did not answer within 0.2 s"):
        await episode.step("hang")
    assert time.monotonic() - started < 2


async def test_a_thread_that_an_environment_keeps_is_replaced_and_counted_until_it_comes_back():
    threads, held = EnvironmentThreads(1), threading.Event()
    while threads.stuck < 2:
        with pytest.raises(EnvironmentFailed, match="stuck did not answer"):
            await threads.call(held.wait, name="stuck", timeout_s=0.05)
    assert await threads.call(lambda: 7, name="next", timeout_s=5) == 7
    held.set()
    async with asyncio.timeout(5):
        while threads.stuck:
            await asyncio.sleep(0.01)
    assert await threads.call(lambda: 8, name="last", timeout_s=5) == 8


async def test_calls_that_never_return_end_the_run_before_threads_run_out():
    threads, held = EnvironmentThreads(1), threading.Event()
    while threads.stuck < 4:
        with pytest.raises(EnvironmentFailed):
            await threads.call(held.wait, name="stuck", timeout_s=0.05)
    with pytest.raises(EnvironmentsStuck, match="the next was not called: 4 earlier calls .* have not returned"):
        await threads.call(lambda: 7, name="the next", timeout_s=5)
    held.set()


async def test_an_environment_that_cannot_be_closed_costs_no_more_than_a_deadline(threads, monkeypatch, caplog):
    monkeypatch.setattr(stepping, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ScriptedEnv, "close", lambda self: time.sleep(2))
    episode = await start(threads)
    await episode.abandon()
    assert "environment 'scripted' on prompt 12, sample 3, which is given up, did not answer" in caplog.text


async def test_a_wrong_row_is_an_error_at_the_start_of_the_sample(threads):
    with pytest.raises(EnvironmentFailed, match="'arithmetic' at the start of prompt 12, sample 3 raised ValueError"):
        await start(threads, env_class="arithmetic")


async def test_an_environment_that_begins_without_messages_is_named(threads, monkeypatch):
    monkeypatch.setattr(ScriptedEnv, "init", lambda self, prompt: ([], {}))
    with pytest.raises(EnvironmentFailed, match=r"at the start of prompt 12, sample 3 returned \[\] from init"):
        await start(threads)


async def test_an_episode_ends_with_the_environments_metrics(threads):
    episode = await start(threads)
    assert (await episode.step("fine")).reward == 0.5
    assert await episode.finish() == {"turns": 1, "note": "text", "max_turns": 2}


async def test_at_most_so_many_calls_run_at_once_and_waiting_for_a_thread_is_not_held_against_a_call():
    threads, running, most = EnvironmentThreads(3), [], []

    def work():
        running.append(threading.get_ident())
        most.append(len(running))
        time.sleep(0.1)
        running.pop()

    await asyncio.gather(*(threads.call(work, name="x", timeout_s=0.25) for _ in range(12)))
    assert max(most) == 3


@pytest.mark.parametrize(("answer", "reward"), [("015", 1.0), (" 015\n", 1.0), ("15", 0.0), ("0155", 0.0), ("", 0.0)])
def test_arithmetic_rewards_exactly_the_answer(answer, reward):
    env = environments.make("arithmetic", env_config={}, extras={"reward_spec": {"ground_truth": "015"}})
    assert env.step(answer)["reward"] == reward


def test_an_unknown_environment_is_answered_with_the_known_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"unknown environment 'gsm9k': known: .*aime.*arithmetic.*did you mean gsm8k\?"
    ):
        environments.make("gsm9k", env_config={}, extras={})


def test_a_plugin_module_registers_by_being_imported(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text(
        "from skyrl.train import environments\nenvironments.register('mine', 'test_environments:ScriptedEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environments.import_plugins(["my_envs"])
    assert "mine" in environments.known()
    with pytest.raises(ValueError, match=r"environment.plugins: cannot import 'no_such_module'"):
        environments.import_plugins(["no_such_module"])
    (tmp_path / "licensed.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(ValueError, match=r"environment.plugins: 'licensed' raised RuntimeError: no licence"):
        environments.import_plugins(["licensed"])


def test_a_loss_that_a_plugin_registers_is_known_to_the_rules(tmp_path, monkeypatch):
    """The module lies in the folder of the run, which a console script's path does not have."""
    (tmp_path / "losses_of_a_test.py").write_text(
        "from skyrl.train.algorithms.policy_losses import register_policy_loss\n"
        "register_policy_loss('mine', lambda inputs, algorithm: None)\n"
    )
    monkeypatch.chdir(tmp_path)
    embedded = Path(skyrl.train.quickstart.__file__).parent / "embedded.yaml"
    argv = [f"@{embedded}", "generator.inference_engine.backend=reference", "trainer.algorithm.policy_loss_type=mine"]
    with pytest.raises(ConfigError, match="policy_loss_type=mine"):
        backends.resolve(argv, announce=lambda line: None)
    cfg, _ = backends.resolve([*argv, "environment.plugins=[losses_of_a_test]"], announce=lambda line: None)
    assert cfg.environment.plugins == ("losses_of_a_test",)


def test_a_name_means_one_environment():
    environments.register("scripted", ScriptedEnv)
    with pytest.raises(ValueError, match="'scripted' is already registered"):
        environments.register("scripted", BaseTextEnv)


def test_metrics_of_episodes_are_averaged_and_text_is_left_out():
    metrics = environments.aggregate_metrics("scripted", [{"turns": 1, "note": "a"}, {"turns": 2, "note": "b"}])
    assert metrics == {"turns": 1.5}
    assert all(math.isfinite(v) for v in metrics.values())
