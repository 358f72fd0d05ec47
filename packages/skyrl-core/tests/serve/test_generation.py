"""What the transformers server answers over a socket, against plain transformers and an independent sampler."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.reference.sampling import draw_shaped, uniforms
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling

RAW, TEMPERATURE, SAMPLING = LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING
pytestmark = pytest.mark.ci
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
FREE = Sampling(max_tokens=24, seed=7, ignore_eos=True)


async def generate(client, prompt, sampling, *, mode=RAW, **more):
    return await client.generate(prompt, sampling, mode=mode, timeout_s=60, **more)


async def together(client, prompts, sampling, **more):
    answers = await asyncio.gather(*(generate(client, p, sampling, **more) for p in prompts))
    return [a.samples[0] for a in answers]


def ids(sample) -> list[int]:
    return sample.token_ids.tolist()


async def test_greedy_tokens_are_those_of_generate_for_32_prompts_of_mixed_lengths(client, teacher):
    prompts = teacher.prompts(32)
    samples = await together(client, prompts, GREEDY)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert ids(sample) == teacher.generate(prompt, GREEDY.max_tokens)
        assert np.abs(sample.logprobs - teacher.logprobs(prompt, ids(sample))).max() < 1e-5


@pytest.mark.parametrize(
    ("mode", "temperature", "divisor"), [(RAW, 0.7, 1.0), (TEMPERATURE, 0.7, 0.7), (SAMPLING, 1.3, 1.3)]
)
async def test_logprobs_are_those_of_a_fresh_forward_pass(client, teacher, mode, temperature, divisor):
    prompts = teacher.prompts(16, seed=1)
    samples = await together(client, prompts, replace(FREE, temperature=temperature), mode=mode)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert np.abs(sample.logprobs - teacher.logprobs(prompt, ids(sample), divisor)).max() < 1e-5


SHAPES = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "everything": {"min_p": 0.01, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "temperature": 0.8},
    "counts": {"frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {7: 3.0, 9: -2.0}},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "min_tokens": {"min_tokens": 10, "ignore_eos": False, "stop_token_ids": (5, 6)},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_tokens_and_logprobs_are_those_of_the_reference_sampler_on_the_models_logits(client, teacher, shape):
    sampling = replace(FREE, **shape)
    prompts = teacher.prompts(4, seed=2)
    samples = await together(client, prompts, sampling, mode=SAMPLING)
    for prompt, sample in zip(prompts, samples, strict=True):
        logits = teacher.logits(prompt, ids(sample)).astype(np.float64)
        for place, token in enumerate(ids(sample)):
            u = float(uniforms(np.array([sampling.seed], np.uint64), np.array([place]))[0])
            forbidden = (5, 6, *client.info.model.eos_token_ids) if place < sampling.min_tokens else ()
            expected = draw_shaped(
                logits[place], sampling, SAMPLING, u, prompt=np.array(prompt), output=ids(sample)[:place],
                forbidden=forbidden,
            )  # fmt: skip
            assert token == expected.token
            # float32 noise of the model itself: where it is unsure, another summation order moves a logit by 2e-5
            assert sample.logprobs[place] == pytest.approx(expected.logprobs_V[token], abs=5e-5)


async def test_a_request_alone_makes_the_tokens_that_it_makes_in_a_batch(client, teacher):
    prompts = teacher.prompts(16, seed=3)
    crowd = await together(client, prompts, FREE)
    alone = [(await generate(client, p, FREE)).samples[0] for p in prompts[:4]]
    assert [ids(s) for s in crowd[:4]] == [ids(s) for s in alone]


async def test_samples_have_streams_of_their_own_and_come_again(client, teacher):
    prompt = teacher.prompts(1, shortest=30, seed=4)[0]
    first = await generate(client, prompt, FREE, num_samples=6)
    again = await generate(client, prompt, FREE, num_samples=6)
    made = [ids(s) for s in first.samples]
    assert made == [ids(s) for s in again.samples] and len({tuple(m) for m in made}) == 6
    third = await generate(client, prompt, replace(FREE, seed=FREE.seed + 2))
    assert ids(third.samples[0]) == made[2]
    for sample in first.samples:
        assert np.abs(sample.logprobs - teacher.logprobs(prompt, ids(sample))).max() < 1e-5


async def test_a_sample_ends_at_an_end_token_a_stop_token_or_its_length(client, teacher):
    prompt = teacher.prompts(1, seed=5)[0]
    made = ids((await generate(client, prompt, FREE)).samples[0])
    stop = made[5]
    stopped = (await generate(client, prompt, replace(FREE, stop_token_ids=(stop,)))).samples[0]
    assert ids(stopped) == made[: made.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_match) == (FinishReason.STOP_TOKEN, stop)
    eos = client.info.model.eos_token_ids[0]
    ended = (await generate(client, prompt, replace(GREEDY, ignore_eos=False, logit_bias={eos: 100.0}))).samples[0]
    assert (ids(ended), ended.finish_reason) == ([eos], FinishReason.EOS)
    cut = (await generate(client, prompt, replace(FREE, max_tokens=3))).samples[0]
    assert (ids(cut), cut.finish_reason) == (made[:3], FinishReason.LENGTH)


async def test_a_stop_string_over_two_tokens_ends_the_sample_where_it_is_complete(client, teacher, tiny_tokenizer):
    prompt = teacher.prompts(1, seed=6)[0]
    made = ids((await generate(client, prompt, FREE)).samples[0])
    text = tiny_tokenizer.decode(made, skip_special_tokens=True)
    wanted = text[6:8]
    end = next(n for n in range(len(made)) if wanted in tiny_tokenizer.decode(made[:n], skip_special_tokens=True))
    sampling = replace(FREE, stop_strings=("never that", wanted))
    sample = (await generate(client, prompt, sampling)).samples[0]
    assert ids(sample) == made[:end]
    assert (sample.finish_reason, sample.stop_match) == (FinishReason.STOP_STRING, wanted)


async def test_the_identity_is_that_of_the_checkpoint_with_tied_tensors_once(client, teacher):
    model = client.info.model
    assert {t.name: t.shape for t in model.tensors} == {n: tuple(t.shape) for n, t in teacher.original.items()}
    assert (model.vocab_size, model.dtype, model.max_context) == (100, "f32", 2048)
    assert model.eos_token_ids == (2,) and model.tokenizer_digest


async def test_prompt_logprobs_of_a_distribution_nobody_drew_from_are_refused(client):
    with pytest.raises(InvalidRequest, match="RAW or TEMPERATURE"):
        await generate(client, [5, 6, 7], replace(FREE, top_p=0.5), mode=SAMPLING, prompt_last_n=2)


async def test_scores_prompt_logprobs_and_top_logprobs_are_those_of_one_forward_pass(client, teacher):
    prompts = teacher.prompts(8, shortest=2, seed=8)
    scored = await asyncio.gather(
        *(client.score(p, 1, mode=TEMPERATURE, temperature=0.7, top_logprobs=3, timeout_s=30) for p in prompts)
    )
    for prompt, scores in zip(prompts, scored, strict=True):
        assert np.abs(scores.logprobs - teacher.logprobs(prompt[:1], prompt[1:], 0.7)).max() < 1e-5
        assert scores.top.token_ids.shape == (len(prompt) - 1, 3)
    answer = await generate(client, prompts[0] * 2, FREE, prompt_last_n=1000, top_logprobs=4)
    full = prompts[0] * 2
    assert np.isnan(answer.prompt_logprobs[0])
    assert np.abs(answer.prompt_logprobs[1:] - teacher.logprobs(full[:1], full[1:])).max() < 1e-5
    sample = answer.samples[0]
    best = np.sort(teacher.logits(full, ids(sample)), axis=1)[:, ::-1]
    best -= np.log(np.exp(teacher.logits(full, ids(sample)).astype(np.float64)).sum(axis=1, keepdims=True))
    assert np.abs(sample.top.logprobs - best[:, :4]).max() < 1e-5
