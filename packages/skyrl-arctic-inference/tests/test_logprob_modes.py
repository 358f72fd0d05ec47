"""Which logprob modes are refused for which parameters."""

from __future__ import annotations

import pytest
from skyrl_arctic_inference.engine.logprobs import acting, refuse_inexact
from skyrl_rollout.tokens import LogprobMode, Sampling

RAW, TEMPERATURE, SAMPLING = LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING
ACTING = {
    "top_p": Sampling(top_p=0.9),
    "top_k": Sampling(top_k=4),
    "min_p": Sampling(min_p=0.1),
    "min_tokens": Sampling(min_tokens=2),
    "frequency_penalty": Sampling(frequency_penalty=0.1),
    "presence_penalty": Sampling(presence_penalty=-0.1),
    "repetition_penalty": Sampling(repetition_penalty=1.2),
    "logit_bias": Sampling(logit_bias={1: 1.0}),
}


@pytest.mark.parametrize("name", ACTING)
def test_each_parameter_that_acts_is_named_and_only_sampling_is_left(name):
    assert acting(ACTING[name]) == [name]
    for mode in (RAW, TEMPERATURE):
        with pytest.raises(ValueError, match=name):
            refuse_inexact(mode, ACTING[name])
    refuse_inexact(SAMPLING, ACTING[name])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_temperature_alone_leaves_every_mode_but_raw(temperature):
    sampling = Sampling(temperature=temperature, seed=3, stop_token_ids=(4,), ignore_eos=True)
    refuse_inexact(TEMPERATURE, sampling)
    refuse_inexact(SAMPLING, sampling)
    if temperature in (0.0, 1.0):
        refuse_inexact(RAW, sampling)
    else:
        with pytest.raises(ValueError, match=r"temperature 0\.5"):
            refuse_inexact(RAW, sampling)


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_greedy_is_not_touched_by_what_only_cuts_the_tail(name):
    given = {name: getattr(ACTING[name], name)}
    refuse_inexact(RAW, Sampling(temperature=0.0, **given))
