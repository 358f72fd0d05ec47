"""Samples from events: what is put together, and every contradiction that is an error."""

import numpy as np
import pytest
from skyrl_rollout.assembly import Assembly
from skyrl_rollout.errors import CorruptBytes
from skyrl_rollout.events import Delta, SampleFinished, Started
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling, VersionSpan
from skyrl_rollout.weights.manifest import content_digest

PROMPT = np.arange(3, dtype=np.int32).tobytes()
STARTED = Started(1, "one", 4, Sampling(seed=1), LogprobMode.RAW, 2, content_digest(PROMPT))


def delta(offset: int, ids: list[int], version: int, *, sample: int = 0, logprob: float = -1.0) -> Delta:
    return Delta(0, sample, offset, np.array(ids, np.int32), np.full(len(ids), logprob, np.float32), version, version)


def finished(ids: list[int], spans: list[tuple[int, int, int]], *, sample: int = 0, **other: object) -> SampleFinished:
    values = {
        "seq": 0,
        "sample_index": sample,
        "reason": FinishReason.EOS,
        "num_tokens": len(ids),
        "token_digest": content_digest(np.array(ids, np.int32).tobytes()),
        "spans": tuple(VersionSpan(start, n, v, v) for start, n, v in spans),
        "stop_match": None,
        "invalid_logprobs": 0,
        "num_preemptions": 0,
    }
    return SampleFinished(**(values | other))


def assembled(*events: object, num_samples: int = 1) -> Assembly:
    assembly = Assembly("r", PROMPT, num_samples, LogprobMode.RAW)
    for event in events:
        assembly.add(event)
    return assembly


def test_interleaved_samples_keep_their_tokens_and_versions():
    generation = assembled(
        STARTED,
        delta(0, [7, 8], 4),
        delta(0, [1], 4, sample=1),
        delta(2, [9], 5),
        finished([1], [(0, 1, 4)], sample=1),
        delta(3, [2], 5),
        finished([7, 8, 9, 2], [(0, 2, 4), (2, 2, 5)]),
        num_samples=2,
    ).generation()
    first, second = generation.samples
    assert first.token_ids.tolist() == [7, 8, 9, 2] and first.weight_versions.tolist() == [4, 4, 5, 5]
    assert second.token_ids.tolist() == [1] and second.weight_versions.tolist() == [4]
    assert first.token_ids.flags.writeable and generation.cached_prompt_tokens == 2


def test_a_sample_that_ended_before_its_first_token_is_empty():
    (sample,) = assembled(STARTED, finished([], [], reason=FinishReason.ABORTED)).generation().samples
    assert len(sample.token_ids) == len(sample.logprobs) == len(sample.weight_versions) == 0


def test_a_second_start_drops_the_tokens_of_the_first_and_is_counted():
    assembly = assembled(STARTED, delta(0, [1, 2], 4), STARTED._replace(instance_id="two"), delta(0, [3], 0))
    assembly.add(finished([3], [(0, 1, 0)]))
    generation = assembly.generation()
    assert generation.samples[0].token_ids.tolist() == [3]
    assert (generation.instance_id, generation.num_restarts) == ("two", 1)


def test_an_unknown_logprob_stays_in_its_place():
    nan = float("nan")
    assembly = assembled(STARTED, delta(0, [1], 4), delta(1, [2], 4, logprob=nan), delta(2, [3], 4))
    assembly.add(finished([1, 2, 3], [(0, 3, 4)], invalid_logprobs=1))
    assert np.isnan(assembly.generation().samples[0].logprobs).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([STARTED._replace(prompt_token_digest=b"x")], "read another prompt"),
        ([STARTED._replace(mode=LogprobMode.SAMPLING)], "logprobs are SAMPLING, RAW was asked for"),
        ([STARTED, delta(1, [1], 4)], "tokens from offset 1 arrived, 0 was next"),
        ([STARTED, delta(0, [1], 4, sample=1)], "sample 1, which does not exist"),
        ([STARTED, finished([1], [(0, 1, 4)])], "1 tokens were made, 0 arrived"),
        ([STARTED, delta(0, [1], 4), finished([2], [(0, 1, 4)])], "are not those that were made"),
        ([STARTED, delta(0, [1], 4), finished([1], [(0, 1, 5)])], "are not those of its parts"),
        ([STARTED, delta(0, [1], 4), finished([1], [])], "are not those of its parts"),
        ([STARTED, delta(0, [1], 4), finished([1], [(0, 1, 4)], invalid_logprobs=1)], "said to be unknown, 0 are"),
        ([STARTED, finished([], []), finished([], [])], "does not exist or has ended"),
    ],
)
def test_a_contradiction_is_an_error(events, message):
    with pytest.raises(CorruptBytes, match=message):
        assembled(*events)
