"""Whether sampling keys reach the request, and whether logprobs are asked for in the mode that a trainer can use."""

import pytest
from skyrl.train.config import SamplingParams
from skyrl.train.generator.sampling import logprob_mode, to_sampling
from skyrl_rollout.tokens import LogprobMode, Sampling


def test_every_public_key_reaches_the_request():
    params = SamplingParams(
        max_generate_length=9,
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        top_k=7,
        repetition_penalty=1.1,
        stop=("</a>",),
        additional_kwargs={"min_tokens": 2, "stop_token_ids": [5]},
    )
    assert to_sampling(params, key="k") == Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        min_tokens=2,
        stop_token_ids=(5,),
        stop_strings=("</a>",),
        repetition_penalty=1.1,
    )


def test_one_stop_alone_is_a_list_of_one():
    params = SamplingParams(additional_kwargs={"stop_strings": "</a>", "stop_token_ids": 5})
    sampling = to_sampling(params, key="k")
    assert (sampling.stop_strings, sampling.stop_token_ids) == (("</a>",), (5,))


@pytest.mark.parametrize("name", ["best_of", "seed", "max_tokens"])
def test_an_unknown_additional_key_is_refused_with_the_known_ones(name):
    params = SamplingParams(additional_kwargs={name: 1})
    with pytest.raises(ValueError, match=rf"generator.sampling_params.additional_kwargs.{name}: .* known: temperature"):
        to_sampling(params, key="generator.sampling_params")


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        (Sampling(), LogprobMode.TEMPERATURE),
        (Sampling(temperature=0.5), LogprobMode.TEMPERATURE),
        (Sampling(temperature=0.0, top_p=0.9), LogprobMode.TEMPERATURE),
        (Sampling(top_p=0.9), LogprobMode.SAMPLING),
        (Sampling(min_tokens=1), LogprobMode.SAMPLING),
        (Sampling(logit_bias={3: 1.0}), LogprobMode.SAMPLING),
    ],
)
def test_logprobs_are_the_trainers_where_the_whole_distribution_is_drawn_from(sampling, mode):
    assert logprob_mode(sampling) is mode
