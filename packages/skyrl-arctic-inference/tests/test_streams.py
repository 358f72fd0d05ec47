"""How the steps of vLLM become what a reader sees, however late it reads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from skyrl_arctic_inference.engine.streams import RequestTokens, SampleTokens
from skyrl_rollout.server.engine import EngineRequest, SampleEnded, TokensMade
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling

EOS = 2


def step(ids: list[int], logprobs: list[float], finish: str | None = None, stop: int | str | None = None):
    """One RequestOutput as vLLM's output processor hands it over."""
    flat = SimpleFlat(logprobs)
    made = SimpleNamespace(token_ids=ids, logprobs=flat, finish_reason=finish, stop_reason=stop)
    return SimpleNamespace(outputs=[made], num_cached_tokens=0, prompt_logprobs=None)


class SimpleFlat:
    def __init__(self, logprobs: list[float]) -> None:
        self.logprobs = logprobs
        self.start_indices = list(range(len(logprobs)))
        self.end_indices = [i + 1 for i in self.start_indices]

    def __len__(self) -> int:
        return len(self.start_indices)


@pytest.fixture
def sample() -> SampleTokens:
    return SampleTokens(0, frozenset({EOS}), asyncio.Event())


def test_steps_are_counted_when_made_and_handed_over_together(sample):
    sample.put(step([5], [-1.0]))
    sample.put(step([6, 7], [-2.0, -3.0]))
    assert sample.num_made == 3
    (made,) = sample.drain()
    assert isinstance(made, TokensMade) and made.token_ids.tolist() == [5, 6, 7]
    assert made.logprobs.tolist() == [-1.0, -2.0, -3.0] and list(sample.drain()) == []


def test_tokens_made_while_the_reader_holds_a_delta_come_before_the_end(sample):
    sample.put(step([5], [-1.0]))
    reading = sample.drain()
    first = next(reading)
    sample.put(step([6], [-2.0], "length"))
    second, end = reading
    assert first.token_ids.tolist() == [5] and second.token_ids.tolist() == [6]
    assert end == SampleEnded(0, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", EOS, FinishReason.EOS),
        ("stop", 9, FinishReason.STOP_TOKEN),
        ("stop", "##", FinishReason.STOP_STRING),
        ("length", None, FinishReason.LENGTH),
        ("abort", None, FinishReason.ABORTED),
    ],
)
def test_why_a_sample_ended(sample, finish, stop, reason):
    sample.put(step([9], [-1.0], finish, stop))
    assert list(sample.drain())[-1] == SampleEnded(0, reason, stop)


def test_an_abort_repeats_no_token_though_vllm_hands_over_all_logprobs_again(sample):
    sample.put(step([5], [-1.0]))
    list(sample.drain())
    sample.put(step([], [-1.0], "abort"))
    assert list(sample.drain()) == [SampleEnded(0, FinishReason.ABORTED)] and sample.num_made == 1


def test_a_missing_logprob_is_nan_and_shifts_nothing(sample):
    sample.put(step([5, 6], []))
    (made,) = sample.drain()
    assert len(made.logprobs) == 2 and np.isnan(made.logprobs).all()


def test_an_error_comes_after_the_tokens_before_it(sample):
    sample.put(step([5], [-1.0]))
    sample.put(RuntimeError("engine"))
    reading = sample.drain()
    assert next(reading).token_ids.tolist() == [5] and sample.is_done
    with pytest.raises(RuntimeError, match="engine"):
        next(reading)


def test_an_end_that_vllm_calls_an_error_is_one(sample):
    sample.put(step([], [], "error"))
    with pytest.raises(RuntimeError, match="'error'"):
        list(sample.drain())


def test_ignoring_the_end_token_makes_it_a_stop_token_when_it_is_listed():
    sampling = Sampling(ignore_eos=True, stop_token_ids=(EOS,), max_tokens=5)
    request = EngineRequest("r", np.zeros(1, np.int32), sampling, LogprobMode.SAMPLING, 2, "")
    tokens = RequestTokens(request, frozenset({EOS}))
    tokens.samples[1].put(step([EOS], [-1.0], "stop", EOS))
    assert tokens.counts == [0, 1] and not tokens.is_done
    assert list(tokens.samples[1].drain())[-1].reason is FinishReason.STOP_TOKEN


def test_a_pause_that_aborts_names_the_reason_for_samples_still_running():
    request = EngineRequest("r", np.zeros(1, np.int32), Sampling(max_tokens=5), LogprobMode.SAMPLING, 2, "")
    tokens = RequestTokens(request, frozenset())
    tokens.samples[0].engine_id = "r/0-x"
    assert tokens.live_ids == ["r/0-x"]
    tokens.end_with(FinishReason.PAUSED)
    tokens.samples[0].put(step([], [], "abort"))
    assert list(tokens.samples[0].drain()) == [SampleEnded(0, FinishReason.PAUSED)] and tokens.live_ids == []
