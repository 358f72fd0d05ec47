"""Two parts of one sample become one: every token keeps its logprob and its version, and its end is the last one's."""

from dataclasses import replace

import numpy as np
import pytest
from skyrl_rollout.failover import can_continue
from skyrl_rollout.seeds import SEED_MASK, continued_seed
from skyrl_rollout.splice import ended, spliced
from skyrl_rollout.tokens import FinishReason, Sample, Sampling, TopK
from skyrl_rollout.versions import VersionLedger, versions_per_token


def part(ids, version, instance, reason=FinishReason.ABORTED, cut=None) -> Sample:
    ledger = VersionLedger(version)
    if cut is not None:
        ledger.cut(cut, version + 1)
    spans = ledger.spans(len(ids))
    return Sample(
        token_ids=np.array(ids, np.int32),
        logprobs=-np.array(ids, np.float32),
        weight_versions=versions_per_token(spans, len(ids)),
        finish_reason=reason,
        spans=spans,
        instance_ids=(instance,),
        num_preemptions=1,
    )


def test_the_parts_follow_each_other_and_equal_versions_make_one_span():
    whole = spliced(spliced(None, part([5, 6, 7], 1, "a", cut=1)), part([8, 9], 2, "b", FinishReason.EOS, cut=1))
    assert whole.token_ids.tolist() == [5, 6, 7, 8, 9] and whole.logprobs.tolist() == [-5, -6, -7, -8, -9]
    assert whole.weight_versions.tolist() == [1, 2, 2, 2, 3]
    assert [(s.start, s.length, s.weight_version) for s in whole.spans] == [(0, 1, 1), (1, 3, 2), (4, 1, 3)]
    assert versions_per_token(whole.spans, 5).tolist() == whole.weight_versions.tolist()
    assert whole.finish_reason is FinishReason.EOS and whole.instance_ids == ("a", "b") and whole.num_preemptions == 2


def test_what_travels_beside_the_tokens_is_joined_with_them():
    first, second = (
        replace(
            part(ids, 1, "a"),
            top=TopK(np.array(ids)[:, None], np.zeros((len(ids), 1), np.float32)),
            extras={"top_p_token_ids": np.array([[i] * len(ids) for i in ids])},
        )
        for ids in ([5, 6], [7])
    )
    whole = spliced(first, second)
    assert whole.top is not None and whole.top.token_ids.tolist() == [[5], [6], [7]]
    assert whole.extras["top_p_token_ids"].tolist() == [[5, 5], [6, 6], [7, -1]]
    assert spliced(first, part([], 1, "b")).top is first.top


def test_a_sample_whose_end_alone_was_lost_is_known_by_its_last_token():
    sampling = Sampling(max_tokens=3, stop_token_ids=(8,))
    for ids, reason in (([1, 8], "STOP_TOKEN"), ([1, 0], "EOS"), ([1, 2, 3], "LENGTH"), ([1, 2], None), ([], None)):
        done = ended(part(ids, 1, "a"), sampling, eos_token_ids=(0,))
        assert (done and done.finish_reason.name) == reason
    assert ended(part([1, 0], 1, "a"), Sampling(max_tokens=3, ignore_eos=True), eos_token_ids=(0,)) is None


@pytest.mark.parametrize("seed", [0, 1, SEED_MASK - 1, SEED_MASK])
def test_a_continued_seed_is_one_that_the_protocol_takes_and_moves_on_like_a_counter(seed):
    assert continued_seed(seed, 0) == seed
    assert continued_seed(continued_seed(seed, 3), 4) == continued_seed(seed, 7)
    seeds = {continued_seed(seed + sample & SEED_MASK, k) for sample in range(64) for k in range(1000)}
    assert len(seeds) == 64_000 and max(seeds) <= SEED_MASK


def test_only_what_does_not_depend_on_the_output_alone_goes_on():
    assert can_continue(Sampling(repetition_penalty=1.2, top_k=5, min_tokens=9, logit_bias={1: 2.0}), "continue")
    assert not can_continue(Sampling(), "stop")
    for whole in ({"stop_strings": ("x",)}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}):
        assert not can_continue(Sampling(**whole), "continue")
