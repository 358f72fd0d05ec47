"""Whether a growing trajectory keeps every token, mask, logprob, version and reward where it belongs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skyrl.train.generator.draft import TrajectoryDraft, UnknownVersion
from skyrl.train.generator.trajectory import PromptTask
from skyrl_rollout.tokens import FinishReason, Sample

TASK = PromptTask("7", [], "arithmetic", {"data_source": "sums"})


def sample(token_ids, *, versions=None, logprobs=None) -> Sample:
    n = len(token_ids)
    return Sample(
        np.asarray(token_ids, np.int32),
        np.asarray(logprobs if logprobs is not None else [-0.5] * n, np.float32),
        np.asarray(versions if versions is not None else [3] * n, np.int64),
        FinishReason.EOS,
    )


IDS = st.lists(st.integers(0, 99), min_size=1, max_size=6)
TURN = st.tuples(IDS, st.lists(st.integers(100, 199), max_size=4), st.floats(-2, 2, width=32))


@given(prompt=IDS, turns=st.lists(TURN, min_size=1, max_size=4))
def test_every_turn_and_observation_is_kept_with_its_mask_and_reward(prompt, turns):
    draft = TrajectoryDraft(np.array(prompt))
    tokens, mask, rewards = [], [], []
    for sampled, observed, reward in turns:
        draft.add_turn(sample(sampled), min_version=3, where="here")
        draft.add_reward(reward)
        draft.add_observation(np.array(observed, np.int32))
        tokens += sampled + observed
        mask += [1] * len(sampled) + [0] * len(observed)
        rewards += [0] * (len(sampled) - 1) + [reward] + [0] * len(observed)
        assert draft.input_token_ids.tolist() == prompt + tokens
        assert draft.num_input_tokens == len(prompt + tokens)
    t = draft.finish(TASK, 2)
    assert t.response_token_ids.tolist() == tokens
    assert t.loss_mask.tolist() == mask
    assert t.rewards.tolist() == rewards
    assert t.weight_versions.tolist() == [3 if m else -1 for m in mask]
    assert t.rollout_logprobs.tolist() == [-0.5 if m else 0.0 for m in mask]
    assert t.turn_num_tokens == tuple(len(sampled) for sampled, _, _ in turns)
    assert (t.id.uid, t.id.repetition, t.num_turns, t.data_source) == ("7", 2, len(turns), "sums")


def test_a_sample_of_an_unknown_version_is_refused():
    with pytest.raises(UnknownVersion, match="prompt 7: tokens of an unknown version"):
        TrajectoryDraft(np.array([1])).add_turn(sample([1, 2], versions=[3, -1]), min_version=0, where="prompt 7")


def test_a_sample_older_than_the_last_publish_is_refused():
    with pytest.raises(UnknownVersion, match="weight version 2, but version 3 is published"):
        TrajectoryDraft(np.array([1])).add_turn(sample([1, 2], versions=[2, 3]), min_version=3, where="here")


@pytest.mark.parametrize("wrong", [sample([]), sample([1, 2], versions=[1]), sample([1, 2], logprobs=[0.0])])
def test_a_sample_without_one_logprob_and_version_per_token_is_refused(wrong):
    with pytest.raises(UnknownVersion, match="expected one of each per token"):
        TrajectoryDraft(np.array([1])).add_turn(wrong, min_version=0, where="here")


def test_an_unknown_logprob_keeps_its_place():
    draft = TrajectoryDraft(np.array([1]))
    draft.add_turn(sample([1, 2], logprobs=[np.nan, -1]), min_version=0, where="here")
    assert np.isnan(draft.finish(TASK, 0).rollout_logprobs).tolist() == [True, False]


def test_an_end_of_turn_that_is_taken_back_leaves_its_reward_on_the_token_before():
    draft = TrajectoryDraft(np.array([1]))
    draft.add_turn(sample([5, 6, 2]), min_version=0, where="here")
    draft.add_reward(1.0)
    draft.drop_last_token()
    t = draft.finish(TASK, 0)
    assert (t.response_token_ids.tolist(), t.rewards.tolist(), t.turn_num_tokens) == ([5, 6], [0, 1], (2,))


def test_the_only_token_of_a_turn_is_never_taken_back():
    draft = TrajectoryDraft(np.array([1]))
    draft.add_turn(sample([2]), min_version=0, where="here")
    draft.drop_last_token()
    assert draft.finish(TASK, 0).response_token_ids.tolist() == [2]
