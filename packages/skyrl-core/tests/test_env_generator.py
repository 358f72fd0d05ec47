"""Whether trajectories are exactly what a real rollout server sampled, turn by turn, scored where it belongs.

The server is the reference server in a process of its own: a request with the same seed and the same context gives the
same tokens again, so every turn is checked against a second, direct request.
"""

from dataclasses import replace

import numpy as np
import pytest
from skyrl.train import environments
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.environments import EnvironmentFailed
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.generator.trajectory import PromptTask, Trajectory
from skyrl.train.seeds import derive
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_rollout.errors import DeadlineExceeded
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.tokens import LogprobMode, Sampling

SEED = 42


class CountingEnv(BaseTextEnv):
    """Answers each turn with its number; rewards turn k with k; three turns at most."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.extras = extras
        self.turns = 0

    def init(self, prompt):
        if self.extras.get("own_prompt"):
            return [{"role": "user", "content": f"{id(self)}"}], {}
        return prompt, {}

    def step(self, action):
        self.turns += 1
        if self.extras.get("fail_at") == self.turns:
            raise RuntimeError("the judge is away")
        done = self.turns == min(3, self.extras["max_turns"])
        observations = [] if done else [{"role": "user", "content": f"<{self.turns}>"}]
        return BaseTextEnvStepOutput(observations=observations, reward=self.turns, done=done, metadata={})

    def get_metrics(self):
        return {"turns": self.turns}


environments.register("counting", CountingEnv)


def config(**generator) -> SkyRLTrainConfig:
    generator = {"max_turns": 3, "max_input_length": 500, **generator}
    generator["sampling_params"] = {"max_generate_length": 6, **generator.get("sampling_params", {})}
    return SkyRLTrainConfig.model_validate({"trainer": {"seed": SEED}, "generator": generator})


def task(uid="0", text="12+3=", env="counting", **extras) -> PromptTask:
    return PromptTask(uid, [{"role": "user", "content": text}], env, extras)


@pytest.fixture
async def pool(reference_url):
    async with await RolloutPool.connect([reference_url]) as pool:
        yield pool


async def roll_out(pool, tokenizer, tasks, cfg=None, *, n=1, step=1, phase="train", **kwargs) -> list[Trajectory]:
    generator = EnvGenerator(cfg or config(), tokenizer, pool)
    return await generator.generate(
        tasks, n_samples=n, sampling=generator.train_sampling, step=step, phase=phase, **kwargs
    )


def segments(t: Trajectory) -> list[tuple[int, np.ndarray]]:
    """(mask, positions) of each run of equal loss mask."""
    cuts = np.flatnonzero(np.diff(t.loss_mask)) + 1
    return [(int(t.loss_mask[run[0]]), run) for run in np.split(np.arange(len(t.loss_mask)), cuts)]


async def test_every_turn_continues_exactly_the_tokens_before_it(pool, tiny_tokenizer):
    (t,) = await roll_out(pool, tiny_tokenizer, [task(uid="9")], step=4)
    assert t.num_turns == 3
    context, turn = t.prompt_token_ids.tolist(), 0
    assert context == tiny_tokenizer.encode("12+3=", add_special_tokens=False)
    for sampled, run in segments(t):
        tokens = t.response_token_ids[run]
        if sampled:
            turn += 1
            again = await pool.clients[0].generate(
                context,
                Sampling(max_tokens=6, seed=derive(SEED, 4, "train", "9", turn, 0)),
                mode=LogprobMode.TEMPERATURE,
                timeout_s=10,
            )
            assert tokens.tolist() == again.samples[0].token_ids.tolist()
            np.testing.assert_array_equal(t.rollout_logprobs[run], again.samples[0].logprobs)
            assert t.rewards[run].tolist() == [0] * (len(run) - 1) + [turn]
            assert set(t.weight_versions[run]) == {pool.highest_version()}
        else:
            assert tokens.tolist() == tiny_tokenizer.encode(f"<{turn}>", add_special_tokens=False)
            assert set(t.weight_versions[run]) == {-1}
            assert not t.rewards[run].any()
            assert not t.rollout_logprobs[run].any()
        context += tokens.tolist()
    assert turn == 3
    assert t.turn_num_tokens == tuple(len(run) for sampled, run in segments(t) if sampled)
    assert t.total_reward == 6
    assert t.env_metrics == {"turns": 3}


async def test_the_first_turn_of_a_group_is_one_request_for_all_its_samples(pool, tiny_tokenizer):
    group = await roll_out(pool, tiny_tokenizer, [task(uid="9")], config(max_turns=1), n=4)
    again = await pool.clients[0].generate(
        group[0].prompt_token_ids,
        Sampling(max_tokens=6, seed=derive(SEED, 1, "train", "9", 1, 0)),
        mode=LogprobMode.TEMPERATURE,
        num_samples=4,
        timeout_s=10,
    )
    assert [t.response_token_ids.tolist() for t in group] == [s.token_ids.tolist() for s in again.samples]
    assert len({tuple(t.response_token_ids.tolist()) for t in group}) > 1


async def test_samples_of_a_prompt_stand_together_in_the_order_of_the_prompts(pool, tiny_tokenizer):
    seen = []
    trajectories = await roll_out(
        pool, tiny_tokenizer, [task(uid=str(u)) for u in range(3)], n=2, on_progress=lambda *p: seen.append(p)
    )
    assert [(t.id.uid, t.id.repetition) for t in trajectories] == [(str(u), r) for u in range(3) for r in range(2)]
    assert seen == [(done, 6) for done in range(1, 7)]


async def test_the_same_step_gives_the_same_trajectories_and_another_step_or_phase_others(pool, tiny_tokenizer):
    async def tokens(**where):
        got = await roll_out(pool, tiny_tokenizer, [task(uid=str(u)) for u in range(4)], n=2, **where)
        return [t.response_token_ids.tolist() for t in got]

    assert await tokens() == await tokens()
    assert await tokens() != await tokens(step=2)
    assert await tokens() != await tokens(phase="eval")


async def test_an_environment_may_begin_each_sample_with_a_prompt_of_its_own(pool, tiny_tokenizer):
    group = await roll_out(pool, tiny_tokenizer, [task(own_prompt=True)], n=3)
    assert len({tuple(t.prompt_token_ids.tolist()) for t in group}) == 3


async def test_a_template_between_the_turns_is_kept_token_by_token(pool, chat_tokenizer):
    (t,) = await roll_out(pool, chat_tokenizer, [task()])
    between = [chat_tokenizer.decode(t.response_token_ids[run]) for sampled, run in segments(t) if not sampled]
    assert [b.removeprefix("<eos>") for b in between] == [f"\n<bos>user\n<{k}><eos>\n<bos>assistant\n" for k in (1, 2)]


async def test_the_public_multi_turn_environment_runs_and_is_scored_per_turn(pool, tiny_tokenizer):
    row = task(env="gsm8k_multi_turn", reward_spec={"ground_truth": "15"}, extra_info={})
    (t,) = await roll_out(pool, tiny_tokenizer, [row], config(max_turns=2))
    assert t.num_turns == 2
    assert t.env_metrics == {"steps": 2}
    asked = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."
    (observed,) = [t.response_token_ids[run] for sampled, run in segments(t) if not sampled]
    assert tiny_tokenizer.decode(observed) == asked


async def test_a_context_that_is_full_ends_the_episode_before_the_observation(pool, tiny_tokenizer):
    (t,) = await roll_out(pool, tiny_tokenizer, [task()], config(max_input_length=12))
    assert (t.num_turns, t.stop_reason, t.loss_mask.min()) == (1, "length", 1)


async def test_a_turn_ends_at_its_length(pool, tiny_tokenizer):
    cfg = config(max_turns=1, sampling_params={"max_generate_length": 2, "additional_kwargs": {"ignore_eos": True}})
    trajectories = await roll_out(pool, tiny_tokenizer, [task()], cfg, n=4)
    assert {len(t.response_token_ids) for t in trajectories} == {2}
    assert {t.stop_reason for t in trajectories} == {"length"}


@pytest.mark.parametrize("key", ["zero_reward_on_non_stop", "apply_overlong_filtering"])
async def test_a_rollout_cut_off_at_its_length_loses_its_reward_or_its_place_in_the_loss(pool, tiny_tokenizer, key):
    sampling = {"max_generate_length": 2, "additional_kwargs": {"ignore_eos": True}}
    plain, changed = [
        (await roll_out(pool, tiny_tokenizer, [task()], config(max_turns=1, sampling_params=sampling, **extra)))[0]
        for extra in ({}, {key: True})
    ]
    assert (plain.total_reward, plain.loss_mask.sum()) == (1, 2)
    assert (changed.total_reward, changed.loss_mask.sum()) == ((0, 2) if key.startswith("zero") else (1, 0))


async def test_evaluation_uses_its_own_sampling(pool, tiny_tokenizer):
    generator = EnvGenerator(config(max_turns=1), tiny_tokenizer, pool)
    greedy = [
        (await generator.generate([task()], n_samples=1, sampling=generator.eval_sampling, step=s, phase="eval"))[0]
        for s in (1, 2)
    ]
    assert greedy[0].response_token_ids.tolist() == greedy[1].response_token_ids.tolist()
    assert generator.eval_sampling == replace(generator.train_sampling, temperature=0.0)


async def test_a_scoring_error_ends_the_call_and_names_environment_sample_and_turn(pool, tiny_tokenizer):
    with pytest.raises(
        EnvironmentFailed, match=r"'counting' on prompt 5, sample \d, turn 2 raised RuntimeError: the judge"
    ):
        await roll_out(pool, tiny_tokenizer, [task(uid="4"), task(uid="5", fail_at=2)], n=2)


async def test_an_unknown_environment_is_refused_before_anything_is_sampled(pool, tiny_tokenizer):
    with pytest.raises(ValueError, match="unknown environment 'countign': known: .*did you mean counting"):
        await roll_out(pool, tiny_tokenizer, [task(env="countign")])


async def test_a_version_that_never_comes_ends_at_the_deadline_with_what_was_waited_for(pool, tiny_tokenizer):
    class Ahead:
        """The real pool, asked for a version that nobody publishes."""

        generate = staticmethod(pool.generate)

        def highest_version(self) -> int:
            return pool.highest_version() + 1

    cfg = config(inference_engine={"request_timeout_s": 0.5})
    expected = r"turn 1 of prompt 3 \(2 samples, 5 tokens of context\): no answer within 0.5 s .*request_timeout_s"
    with pytest.raises(DeadlineExceeded, match=expected):
        await roll_out(Ahead(), tiny_tokenizer, [task(uid="3")], cfg, n=2)


async def test_more_samples_than_fit_at_once_take_turns(pool, tiny_tokenizer):
    cfg = config(max_turns=1, inference_engine={"max_num_seqs": 3})
    assert len(await roll_out(pool, tiny_tokenizer, [task(uid=str(u)) for u in range(5)], cfg, n=4)) == 20
