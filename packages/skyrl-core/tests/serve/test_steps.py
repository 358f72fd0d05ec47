"""What the engine does between two steps: pauses, swaps, preemption, shared prefixes, adapters, and exact counts."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from skyrl_rollout.errors import WrongState
from skyrl_rollout.server.engine import (
    Adapter,
    EngineRequest,
    EngineScoreRequest,
    PromptRead,
    SampleEnded,
    TokensMade,
)
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling
from skyrl_rollout.weights.manifest import TensorLayout

pytestmark = pytest.mark.ci
RAW = LogprobMode.RAW
LONG = Sampling(max_tokens=100, seed=11, ignore_eos=True)
numbers = itertools.count()


def request(prompt, sampling: Sampling = LONG, *, salt: str = "v0", **more) -> EngineRequest:
    more = {"num_samples": 1, "mode": RAW, **more}
    return EngineRequest(f"r{next(numbers)}", np.array(prompt, np.int32), sampling, cache_salt=salt, **more)


class Answer:
    """Everything that a request yielded."""

    def __init__(self, num_samples: int = 1) -> None:
        self.read: PromptRead | None = None
        self.ids: list[list[int]] = [[] for _ in range(num_samples)]
        self.logprobs: list[list[float]] = [[] for _ in range(num_samples)]
        self.ends: dict[int, SampleEnded] = {}


async def run(engine, asked: EngineRequest, answer: Answer | None = None) -> Answer:
    answer = answer or Answer(asked.num_samples)
    async for item in engine.generate(asked):
        if isinstance(item, PromptRead):
            assert not any(answer.ids), "the prompt's part comes before any token"
            answer.read = item
        elif isinstance(item, TokensMade):
            answer.ids[item.sample_index] += item.token_ids.tolist()
            answer.logprobs[item.sample_index] += item.logprobs.tolist()
        else:
            answer.ends[item.sample_index] = item
    return answer


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def as_bytes(weights: dict[str, torch.Tensor]):
    for name, tensor in weights.items():
        yield TensorLayout(name, "f32", tuple(tensor.shape)), memoryview(tensor.numpy()).cast("B")


async def frozen_between_two_tokens(engine, prompts, *, clear_cache: bool):
    """(requests, tasks, tokens made of each): all of them paused with "keep" while they run."""
    asked = [request(p) for p in prompts]
    tasks = [asyncio.create_task(run(engine, a)) for a in asked]
    await until(lambda: all(sum(engine.tokens_made().get(a.request_id, [0])) > 5 for a in asked))
    await engine.pause("keep", clear_cache=clear_cache)
    made = [engine.tokens_made()[a.request_id][0] for a in asked]
    await asyncio.sleep(0.05)
    assert made == [engine.tokens_made()[a.request_id][0] for a in asked], "a token was made while paused"
    assert all(5 < n < LONG.max_tokens for n in made)
    return asked, tasks, made


@pytest.mark.parametrize("retain_kv", [True, False], ids=["retain", "recompute"])
async def test_a_swap_between_two_tokens_is_exact_for_every_running_request(build, teacher, retain_kv):
    engine, other = await build(), teacher.perturbed(1)
    prompts = teacher.prompts(6, shortest=3, seed=20)
    _, tasks, made = await frozen_between_two_tokens(engine, prompts, clear_cache=not retain_kv)
    await engine.load_weights(as_bytes(other))
    await engine.resume()
    answers = [await task for task in tasks]
    for prompt, answer, cut in zip(prompts, answers, made, strict=True):
        ids, logprobs = answer.ids[0], np.array(answer.logprobs[0], np.float32)
        assert len(ids) == LONG.max_tokens
        assert np.abs(logprobs[:cut] - teacher.logprobs(prompt, ids)[:cut]).max() < 1e-4
        by_old_kv = teacher.logprobs_over_a_swap(prompt, ids, cut, other)
        teacher.use(other)
        by_new_kv = teacher.logprobs(prompt, ids)[cut:]
        teacher.use(teacher.original)
        expected, wrong = (by_old_kv, by_new_kv) if retain_kv else (by_new_kv, by_old_kv)
        assert np.abs(logprobs[cut:] - expected).max() < 1e-3
        assert np.abs(logprobs[cut:] - wrong).max() > 1e-2, "the two ways cannot be told apart here"


async def test_a_pause_changes_no_token(build, teacher):
    engine, prompts = await build(), teacher.prompts(3, seed=21)
    undisturbed = [a.ids for a in await asyncio.gather(*(run(engine, request(p)) for p in prompts))]
    for clear_cache in (False, True):
        _, tasks, _ = await frozen_between_two_tokens(engine, prompts, clear_cache=clear_cache)
        await engine.resume()
        assert [(await task).ids for task in tasks] == undisturbed


async def test_weights_are_copied_into_the_parameters_that_are_there(build, teacher):
    engine, prompt = await build(), teacher.prompts(1, seed=22)[0]
    module = engine._batch.model.module
    places = {n: p.data_ptr() for n, p in module.named_parameters()}
    greedy = replace(LONG, temperature=0.0, max_tokens=20)
    before = (await run(engine, request(prompt, greedy))).ids
    for weights, salt in ((teacher.perturbed(2), "v1"), (teacher.original, "v2")):
        await engine.pause("keep", clear_cache=True)
        await engine.load_weights(as_bytes(weights))
        await engine.resume()
        teacher.use(weights)
        assert (await run(engine, request(prompt, greedy, salt=salt))).ids == [teacher.generate(prompt, 20)]
    assert (await run(engine, request(prompt, greedy, salt="v3"))).ids == before
    assert {n: p.data_ptr() for n, p in module.named_parameters()} == places


async def test_weights_with_a_tensor_missing_are_an_error(build, teacher):
    engine = await build()
    await engine.pause("keep", clear_cache=True)
    kept = dict(list(teacher.original.items())[1:])
    with pytest.raises(RuntimeError, match="1 tensors got no value, "):
        await engine.load_weights(as_bytes(kept))


async def test_pause_with_abort_ends_samples_with_what_they_made(build, teacher):
    engine = await build(max_rows=2)
    asked = [request(p, num_samples=2) for p in teacher.prompts(3, seed=23)]
    tasks = [asyncio.create_task(run(engine, a)) for a in asked]
    await until(lambda: engine.load().running == 2 and max(engine.tokens_made()[asked[0].request_id]) > 3)
    await engine.pause("abort", clear_cache=False)
    answers = [await task for task in tasks]
    assert {end.reason for a in answers for end in a.ends.values()} == {FinishReason.PAUSED}
    assert len(answers[0].ids[0]) > 3 and answers[2].ids == [[], []]
    load = engine.load()
    assert (load.running, load.waiting, engine.tokens_made()) == (0, 0, {})


async def test_a_reader_that_leaves_frees_its_slot_and_abort_keeps_the_tokens(build, teacher):
    engine, prompt = await build(), teacher.prompts(1, seed=24)[0]
    endless = replace(LONG, max_tokens=1900)
    left = asyncio.create_task(run(engine, request(prompt, endless)))
    await until(lambda: engine.load().running == 1)
    left.cancel()
    await until(lambda: engine.load().running == 0)
    asked = request(prompt, endless)
    task = asyncio.create_task(run(engine, asked))
    await until(lambda: sum(engine.tokens_made().get(asked.request_id, [0])) > 3)
    await engine.abort(asked.request_id)
    answer = await task
    assert answer.ends[0].reason is FinishReason.ABORTED and 3 < len(answer.ids[0]) < 1900
    await engine.abort("unknown")


async def test_rows_that_outgrow_the_kv_memory_are_computed_again_and_make_the_same_tokens(build, teacher):
    prompts = teacher.prompts(6, seed=25)
    roomy = await build()
    expected = [a.ids for a in await asyncio.gather(*(run(roomy, request(p)) for p in prompts))]
    bytes_per_token = roomy._batch.model.kv_bytes_per_token
    tight = await build(kv_bytes=64 * 8 * bytes_per_token, prefix_bytes=0)  # eight rows of 64 tokens
    answers = await asyncio.gather(*(run(tight, request(p)) for p in prompts))
    assert [a.ids for a in answers] == expected
    assert sum(a.ends[0].num_preemptions for a in answers) > 0
    assert tight._batch.model.kv.capacity_tokens <= 64 * 8


async def test_a_long_prompt_is_read_in_parts(build, teacher):
    prompt = teacher.prompts(1, shortest=150, longest=150, seed=26)[0]
    asked = replace(LONG, max_tokens=20)
    in_parts = await build(step_tokens=16)
    answer = await run(in_parts, request(prompt, asked, prompt_last_n=40))
    assert np.abs(np.array(answer.logprobs[0]) - teacher.logprobs(prompt, answer.ids[0])).max() < 1e-4
    assert answer.read is not None and answer.read.logprobs is not None
    assert np.abs(answer.read.logprobs - teacher.logprobs(prompt[:110], prompt[110:])).max() < 1e-4
    scores = [s async for s in in_parts.score(EngineScoreRequest("s", np.array(prompt), 100, RAW, 1.0, 0, "v0"))]
    assert (
        np.abs(np.concatenate([s.logprobs for s in scores]) - teacher.logprobs(prompt[:100], prompt[100:])).max() < 1e-4
    )


async def test_a_prompt_that_goes_on_from_an_ended_row_is_read_from_its_kv_under_the_same_salt_only(build, teacher):
    engine = await build()
    prompt = teacher.prompts(1, shortest=30, longest=30, seed=27)[0]
    first = await run(engine, request(prompt, replace(LONG, max_tokens=10)))
    assert first.read is not None and first.read.cached_tokens == 0
    longer = [*prompt, *first.ids[0], 5, 6, 7]
    second = await run(engine, request(longer, replace(LONG, max_tokens=10)))
    assert second.read is not None and second.read.cached_tokens == len(prompt) + 9  # the last token was not fed
    assert np.abs(np.array(second.logprobs[0]) - teacher.logprobs(longer, second.ids[0])).max() < 1e-4
    other = await run(engine, request(longer, replace(LONG, max_tokens=1), salt="v1"))
    assert other.read is not None and other.read.cached_tokens == 0
    assert await engine.reset_cache(preempt_running=False) > 0
    again = await run(engine, request(longer, replace(LONG, max_tokens=1)))
    assert again.read is not None and again.read.cached_tokens == 0


async def test_a_cache_with_running_requests_is_dropped_only_with_their_kv(build, teacher):
    engine, prompt = await build(), teacher.prompts(1, seed=28)[0]
    expected = (await run(engine, request(prompt))).ids
    asked = request(prompt)
    task = asyncio.create_task(run(engine, asked))
    await until(lambda: sum(engine.tokens_made().get(asked.request_id, [0])) > 3)
    with pytest.raises(WrongState, match="preempt_running"):
        await engine.reset_cache(preempt_running=False)
    assert await engine.reset_cache(preempt_running=True) > 0
    assert (await task).ids == expected


async def test_the_higher_priority_is_served_first(build, teacher):
    engine, prompt = await build(max_rows=1), teacher.prompts(1, seed=29)[0]
    order: list[str] = []

    async def note(name: str, priority: int) -> None:
        await run(engine, request(prompt, replace(LONG, max_tokens=20), priority=priority))
        order.append(name)

    await engine.pause("keep", clear_cache=False)
    tasks = [asyncio.create_task(note(name, p)) for name, p in (("low", 0), ("high", 5), ("middle", 2))]
    await until(lambda: engine.load().waiting == 3)
    await engine.resume()
    await asyncio.gather(*tasks)
    assert order == ["high", "middle", "low"]


async def test_an_adapter_adds_its_part_for_its_policy_alone(build, teacher):
    engine, prompts = await build(), teacher.prompts(3, seed=30)
    noise = torch.Generator().manual_seed(0)
    module = "model.layers.1.self_attn.q_proj"
    a, b = torch.randn(4, 128, generator=noise), torch.randn(128, 4, generator=noise)
    tensors = {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    adapter = Adapter("mine", 1, 4, 2.0, ("q_proj",))
    engine.check_adapter(adapter, [layout for layout, _ in as_bytes(tensors)])
    base = [a.ids for a in await asyncio.gather(*(run(engine, request(p)) for p in prompts))]
    await engine.pause("keep", clear_cache=False)
    await engine.load_adapter(adapter, as_bytes(tensors))
    await engine.resume()
    mixed = await asyncio.gather(
        *(run(engine, request(p, policy_id=policy, salt=policy)) for p in prompts for policy in ("", "mine"))
    )
    assert [m.ids for m in mixed[::2]] == base
    merged = dict(teacher.original)
    merged[f"{module}.weight"] = merged[f"{module}.weight"] + (2.0 / 4) * b @ a
    teacher.use(merged)
    for prompt, answer in zip(prompts, mixed[1::2], strict=True):
        assert np.abs(np.array(answer.logprobs[0]) - teacher.logprobs(prompt, answer.ids[0])).max() < 1e-3
    teacher.use(teacher.original)
    assert [m.ids for m in mixed[1::2]] != base
    with pytest.raises(ValueError, match=r"shape \[4, 128\], expected \[8, 128\]"):
        engine.check_adapter(replace(adapter, rank=8), [layout for layout, _ in as_bytes(tensors)])
    await engine.drop_adapter("mine")
