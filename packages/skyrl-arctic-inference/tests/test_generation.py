"""Tokens and logprobs of a real vLLM server, against the same model under transformers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from serve_process import CONTEXT, TINY_MODEL
from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling
from transformers import AutoTokenizer

pytestmark = pytest.mark.ci
RAW, TEMPERATURE, SAMPLING = LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING
LIMIT = 1e-6  # mean absolute difference of logprobs, float32


async def test_the_ready_line_names_url_model_version_and_where_the_start_went(server, client):
    for part in ("instance=", "model=tiny_model", "version=0", "startup_s=", "import_s=", "engine_s=", "grpc_s="):
        assert part in server.ready_line
    assert client.info.model.dtype == "f32" and client.info.model.max_context == CONTEXT
    assert await client.health()


async def test_greedy_tokens_equal_transformers(client, model):
    prompts = model.prompts(32)
    sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    answers = await asyncio.gather(*(client.generate(p, sampling, mode=RAW, timeout_s=60) for p in prompts))
    assert [a.samples[0].token_ids.tolist() for a in answers] == model.greedy(prompts, 24)


@pytest.mark.parametrize("mode", [RAW, TEMPERATURE, SAMPLING])
async def test_greedy_logprobs_are_log_softmax_of_the_logits_in_every_mode(client, model, mode):
    await compare_logprobs(client, model, Sampling(max_tokens=48, temperature=0.0, ignore_eos=True), mode, divisor=1.0)


@pytest.mark.parametrize("top", [Sampling(top_k=1), Sampling(top_p=0.1)])
async def test_top_k_and_top_p_do_not_act_on_a_greedy_request(client, model, top):
    sampling = Sampling(max_tokens=16, temperature=0.0, top_k=top.top_k, top_p=top.top_p, ignore_eos=True)
    await compare_logprobs(client, model, sampling, RAW, divisor=1.0)


@pytest.mark.parametrize(("temperature", "mode"), [(1.0, RAW), (1.0, TEMPERATURE), (0.7, TEMPERATURE), (1.3, SAMPLING)])
async def test_logprobs_equal_what_a_trainer_recomputes(client, model, temperature, mode):
    sampling = Sampling(max_tokens=64, temperature=temperature, seed=5, ignore_eos=True)
    await compare_logprobs(client, model, sampling, mode, divisor=temperature)


async def test_greedy_and_random_requests_in_one_batch_keep_their_own_logprobs(client, model):
    greedy = Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)
    warm = Sampling(max_tokens=64, temperature=0.7, seed=1, ignore_eos=True)
    await asyncio.gather(
        compare_logprobs(client, model, greedy, TEMPERATURE, divisor=1.0),
        compare_logprobs(client, model, warm, TEMPERATURE, divisor=0.7),
    )


async def test_sampling_logprobs_are_renormalised_over_what_top_k_leaves(client, model):
    prompt = model.prompts(1, seed=3)[0]
    sampling = Sampling(max_tokens=64, temperature=1.0, top_k=1, seed=2, ignore_eos=True)
    answer = await client.generate(prompt, sampling, mode=SAMPLING, timeout_s=60)
    assert np.abs(answer.samples[0].logprobs).max() == 0.0


@pytest.mark.parametrize(
    ("sampling", "mode", "said"),
    [
        (Sampling(top_p=0.9), TEMPERATURE, "top_p"),
        (Sampling(top_k=5), RAW, "top_k"),
        (Sampling(min_p=0.1), TEMPERATURE, "min_p"),
        (Sampling(repetition_penalty=1.1), TEMPERATURE, "repetition_penalty"),
        (Sampling(frequency_penalty=0.5, temperature=0.0), RAW, "frequency_penalty"),
        (Sampling(logit_bias={4: 2.0}), TEMPERATURE, "logit_bias"),
        (Sampling(min_tokens=3, max_tokens=9), TEMPERATURE, "min_tokens"),
        (Sampling(temperature=0.7), RAW, "temperature 0.7"),
        (Sampling(temperature=0.005), SAMPLING, "0.01 to 2.0"),
        (Sampling(presence_penalty=3.0), SAMPLING, "presence_penalty is 3"),
        (Sampling(top_p=0.0), SAMPLING, "top_p"),
        (Sampling(stop_token_ids=(10**6,)), SAMPLING, "vocabulary"),
    ],
)
async def test_what_cannot_be_honoured_exactly_is_refused_by_name(client, sampling, mode, said):
    with pytest.raises(InvalidRequest, match=said):
        await client.generate([5, 6, 7], sampling, mode=mode, timeout_s=10)


async def test_token_ids_outside_the_vocabulary_are_refused_and_the_engine_lives(client, model):
    for ids in ([model.vocab_size], [10**9]):
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await client.generate(ids, Sampling(max_tokens=2), mode=SAMPLING, timeout_s=10)
    assert len((await client.generate([5], Sampling(max_tokens=2), mode=SAMPLING, timeout_s=10)).samples) == 1


async def test_a_prompt_as_long_as_the_context_is_refused_and_a_longer_answer_is_cut(client):
    with pytest.raises(InvalidRequest, match="context"):
        await client.generate([5] * CONTEXT, Sampling(), mode=SAMPLING, timeout_s=10)
    answer = await client.generate([5] * (CONTEXT - 7), Sampling(ignore_eos=True), mode=SAMPLING, timeout_s=10)
    assert len(answer.samples[0].token_ids) == 7 and answer.samples[0].finish_reason is FinishReason.LENGTH


async def test_samples_of_a_seeded_request_repeat_and_sample_i_draws_from_seed_plus_i(client, model):
    prompt = model.prompts(1, seed=9)[0]
    sampling = Sampling(max_tokens=40, seed=100, ignore_eos=True)
    first = await client.generate(prompt, sampling, mode=TEMPERATURE, num_samples=4, timeout_s=60)
    again = await client.generate(prompt, sampling, mode=TEMPERATURE, num_samples=4, timeout_s=60)
    ids = [s.token_ids.tolist() for s in first.samples]
    assert ids == [s.token_ids.tolist() for s in again.samples] and len(set(map(tuple, ids))) == 4
    third = await client.generate(
        prompt, Sampling(max_tokens=40, seed=102, ignore_eos=True), mode=TEMPERATURE, timeout_s=60
    )
    assert third.samples[0].token_ids.tolist() == ids[2]


async def test_a_seeded_sample_is_the_same_alone_and_among_others(client, model):
    prompt = model.prompts(1, seed=9)[0]
    sampling = Sampling(max_tokens=100, seed=7, ignore_eos=True)
    alone = await client.generate(prompt, sampling, mode=TEMPERATURE, timeout_s=60)
    others = [client.generate(p, Sampling(max_tokens=100), mode=SAMPLING, timeout_s=60) for p in model.prompts(40)]
    among, *_ = await asyncio.gather(client.generate(prompt, sampling, mode=TEMPERATURE, timeout_s=60), *others)
    assert among.samples[0].token_ids.tolist() == alone.samples[0].token_ids.tolist()


async def test_the_end_token_and_a_stop_token_end_a_sample_and_are_part_of_it(client, model):
    eos = client.info.model.eos_token_ids[0]
    bias = Sampling(max_tokens=50, logit_bias={eos: 100.0})
    ended = (await client.generate([5, 6], bias, mode=SAMPLING, timeout_s=30)).samples[0]
    assert ended.token_ids.tolist() == [eos] and ended.finish_reason is FinishReason.EOS and ended.stop_match == eos
    greedy = (await client.generate([5, 6], Sampling(max_tokens=20, temperature=0.0, ignore_eos=True), mode=RAW,
                                    timeout_s=30)).samples[0].token_ids.tolist()  # fmt: skip
    stop = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=(greedy[3],))
    stopped = (await client.generate([5, 6], stop, mode=RAW, timeout_s=30)).samples[0]
    assert stopped.token_ids.tolist() == greedy[: greedy.index(greedy[3]) + 1]
    assert stopped.finish_reason is FinishReason.STOP_TOKEN and stopped.stop_match == greedy[3]
    ignored = Sampling(max_tokens=6, ignore_eos=True, logit_bias={eos: 100.0})
    assert (await client.generate([5], ignored, mode=SAMPLING, timeout_s=30)).samples[0].token_ids.tolist() == [eos] * 6


async def test_a_stop_string_ends_a_sample_with_no_token_after_it(client):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    digits = dict.fromkeys(tokenizer.convert_tokens_to_ids(list("0123456789")), 50.0)
    sampling = Sampling(max_tokens=60, seed=1, logit_bias=digits, ignore_eos=True)
    whole = (await client.generate([5, 6], sampling, mode=SAMPLING, timeout_s=30)).samples[0].token_ids.tolist()

    text = tokenizer.decode(whole)
    assert len(text) == len(whole), "a token is a character here"
    stop = text[9:12]
    cut = Sampling(max_tokens=60, seed=1, logit_bias=digits, ignore_eos=True, stop_strings=(stop,))
    sample = (await client.generate([5, 6], cut, mode=SAMPLING, timeout_s=30)).samples[0]
    assert sample.finish_reason is FinishReason.STOP_STRING and sample.stop_match == stop
    assert sample.token_ids.tolist() == whole[: text.index(stop) + len(stop)]


async def compare_logprobs(client, model, sampling: Sampling, mode: LogprobMode, *, divisor: float) -> None:
    prompts = model.prompts(8, seed=2)
    answers = await asyncio.gather(*(client.generate(p, sampling, mode=mode, timeout_s=60) for p in prompts))
    differences = [
        np.abs(s.logprobs - model.logprobs(p, s.token_ids, divisor))
        for p, a in zip(prompts, answers, strict=True)
        for s in a.samples
    ]
    assert np.concatenate(differences).mean() <= LIMIT
