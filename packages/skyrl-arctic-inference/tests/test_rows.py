"""Logprobs from vLLM's flat lists, spans of given tokens, and the first item of a stream."""

from __future__ import annotations

import numpy as np
import pytest
from skyrl_arctic_inference.engine.rows import given_rows, prompt_logprobs, sampled_logprobs, top_of
from skyrl_arctic_inference.engine.spans import (
    GivenSpan,
    prompt_span,
    refuse_inexact_prompt,
    refuse_inexact_score,
    score_span,
)
from skyrl_arctic_inference.engine.streams import RequestTokens
from skyrl_rollout.server.engine import EngineRequest, EngineScoreRequest, PromptRead, TokensMade
from skyrl_rollout.tokens import LogprobMode, Sampling
from test_streams import SimpleFlat, step

RAW, TEMPERATURE, SAMPLING = LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING


class Flat(SimpleFlat):
    """Positions of three entries: the token itself, then the two best."""

    def __init__(self, positions: list[list[tuple[int, float]]]) -> None:
        entries = [e for position in positions for e in position]
        self.token_ids, self.logprobs = [t for t, _ in entries], [x for _, x in entries]
        ends = np.cumsum([len(p) for p in positions]).tolist()
        self.start_indices, self.end_indices = [0, *ends[:-1]], ends


TWO = [[(7, -3.0), (1, -0.5), (2, -1.0)], [(1, -0.1), (1, -0.1), (3, -4.0)]]


def request(**more) -> EngineRequest:
    sampling = Sampling(max_tokens=5, temperature=more.pop("temperature", 0.5), top_p=more.pop("top_p", 1.0))
    ids, mode = np.arange(more.pop("length", 10), dtype=np.int32), more.pop("mode", TEMPERATURE)
    return EngineRequest("r", ids, sampling, mode, more.pop("num_samples", 1), "", **more)


def test_top_tokens_come_beside_the_sampled_one():
    logprobs, top = sampled_logprobs(Flat(TWO), 2, 2)
    assert logprobs == [-3.0, -0.1]
    best = top_of(top, 2)
    assert best.token_ids.tolist() == [[1, 2], [1, 3]] and best.logprobs[0].tolist() == [-0.5, -1.0]
    assert sampled_logprobs(Flat(TWO), 1, 0) == ([-0.1], [])


def test_top_tokens_that_are_missing_are_nan_and_keep_their_shape():
    best = top_of(sampled_logprobs(None, 3, 2)[1], 2)
    assert best.token_ids.shape == best.logprobs.shape == (3, 2) and np.isnan(best.logprobs).all()


def test_rows_of_given_tokens_leave_out_the_first_which_is_empty():
    logprobs, top = given_rows(Flat([[], *TWO]), 2, 2)
    assert logprobs.tolist() == [-3.0, np.float32(-0.1)] and top.token_ids.shape == (2, 2)
    assert np.isnan(given_rows(Flat(TWO), 3, 0)[0]).all()


def test_prompt_logprobs_are_padded_in_front():
    assert np.isnan(prompt_logprobs(Flat([[], *TWO]), 3)).tolist() == [True, False, False]
    assert np.isnan(prompt_logprobs(None, 2)).all()


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        (request(prompt_last_n=3), GivenSpan(7, -1, 0.5)),
        (request(prompt_last_n=10, mode=RAW, temperature=1.0), GivenSpan(1, -1, 1.0)),
        (request(prompt_last_n=2, temperature=0.0), GivenSpan(8, -1, 1.0)),
        (request(prompt_last_n=1, length=1), None),
        (request(), None),
    ],
)
def test_the_span_of_a_prompt_is_its_last_tokens_that_have_one_before_them(asked, span):
    assert prompt_span(asked) == span
    assert span is None or GivenSpan.of(span.as_extra_args()) == span


def test_a_score_reads_its_last_token_after_the_prompt():
    score = EngineScoreRequest("s", np.array([4, 5, 6], np.int32), 2, RAW, 0.7, 0, "")
    assert score_span(score) == GivenSpan(2, 6, 1.0)
    refuse_inexact_score(score)
    with pytest.raises(ValueError, match="temperature is 1000"):
        refuse_inexact_score(EngineScoreRequest("s", score.token_ids, 2, TEMPERATURE, 1000.0, 0, ""))


def test_prompt_logprobs_under_shaped_sampling_are_refused_only_in_its_own_mode():
    with pytest.raises(ValueError, match="top_p"):
        refuse_inexact_prompt(request(prompt_last_n=1, mode=SAMPLING, top_p=0.5))
    refuse_inexact_prompt(request(mode=SAMPLING, top_p=0.5))


def test_what_the_first_sample_says_of_the_prompt_comes_before_any_token_of_any_sample():
    tokens = RequestTokens(request(num_samples=2), frozenset())
    tokens.samples[1].put(step([5], [-1.0]))
    assert list(tokens.drain()) == []
    first = step([6], [-2.0])
    first.num_cached_tokens = 128
    tokens.samples[0].put(first)
    prompt, *made = tokens.drain()
    assert prompt == PromptRead(128) and [m.sample_index for m in made if isinstance(m, TokensMade)] == [0, 1]
    tokens.samples[0].put(step([7], [-2.0]))
    assert [type(item) for item in tokens.drain()] == [TokensMade]


def test_a_request_that_ends_before_its_prompt_was_read_says_nothing_of_it():
    tokens = RequestTokens(request(prompt_last_n=2), frozenset())
    tokens.samples[0].put(step([], [], "abort"))
    prompt, _ = tokens.drain()
    assert prompt.cached_tokens == 0 and np.isnan(prompt.logprobs).all()
