"""New weights into a running vLLM server, through the real publish: exact, complete, repeatable, and without a leak."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from served_model import as_tensors
from skyrl_rollout.assembly import Assembly
from skyrl_rollout.errors import ModelMismatch
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights.manifest import TensorLayout
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher

pytestmark = pytest.mark.ci
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
RAW = LogprobMode.RAW


class Trainer:
    """What publishes to the server: one epoch, versions that only grow."""

    def __init__(self, client, transport: str = "auto") -> None:
        self.client = client
        self.publisher = WeightPublisher(transport)

    async def publish(self, weights, *, transport: str | None = None):
        if transport is not None:
            self.publisher.transport = transport
        info = await self.client.refresh()
        epoch = await self.client.acquire_control("test")
        layout = info.model.tensors
        return await self.publisher.publish(
            layout,
            as_tensors(weights, layout),
            [PublishTarget(self.client.url, epoch)],
            target_version=info.weight_version + 1,
            timeout_s=60,
        )


@pytest.fixture
async def trainer(client, model):
    trainer = Trainer(client)
    yield trainer
    await trainer.publish(model.original)  # the next test finds the weights that were loaded
    model.use(model.original)
    trainer.publisher.close()


async def read_slowly(client, prompt, sampling: Sampling, pause_per_event_s: float):
    """(sample, spans) of one generation whose reader sleeps after every event."""
    assembly = Assembly("slow", np.asarray(prompt, "<i4").tobytes(), 1, LogprobMode.TEMPERATURE)
    events = client.generate_events(prompt, sampling, mode=LogprobMode.TEMPERATURE, timeout_s=60, tokens_per_event=8)
    async for event in events:
        assembly.add(event)
        await asyncio.sleep(pause_per_event_s)
    sample = assembly.generation().samples[0]
    return sample, sample.spans


async def greedy(client, prompts) -> list[list[int]]:
    answers = await asyncio.gather(*(client.generate(p, GREEDY, mode=RAW, timeout_s=60) for p in prompts))
    return [a.samples[0].token_ids.tolist() for a in answers]


async def test_the_layout_is_that_of_the_checkpoint_with_tied_tensors_once(client, model):
    names = [t.name for t in client.info.model.tensors]
    assert names == sorted(names) and "lm_head.weight" not in names
    assert set(names) == set(model.original) - {"lm_head.weight"}
    assert all(t.shape == tuple(model.original[t.name].shape) and t.dtype == "f32" for t in client.info.model.tensors)


@pytest.mark.parametrize("transport", ["shm", "inline"])
async def test_after_a_publish_greedy_output_is_that_of_transformers_on_the_new_weights(
    client, model, trainer, transport
):
    prompts = model.prompts(32)
    before = await greedy(client, prompts)
    other = model.perturbed(1)
    report = await trainer.publish(other, transport=transport)
    assert report.transports == {client.url: transport}
    model.use(other)
    after = await greedy(client, prompts)
    assert after == model.greedy(prompts, GREEDY.max_tokens) and after != before
    await trainer.publish(model.original)
    assert await greedy(client, prompts) == before


async def test_logprobs_under_new_weights_equal_the_trainers(client, model, trainer):
    other = model.perturbed(2)
    await trainer.publish(other)
    model.use(other)
    sampling = Sampling(max_tokens=64, temperature=0.7, seed=1, ignore_eos=True)
    differences = []
    for prompt in model.prompts(8):
        answer = await client.generate(prompt, sampling, mode=LogprobMode.TEMPERATURE, timeout_s=60)
        sample = answer.samples[0]
        differences.append(np.abs(sample.logprobs - model.logprobs(prompt, sample.token_ids, 0.7)))
        assert set(sample.weight_versions) == {client.info.weight_version + 1}
    assert np.concatenate(differences).mean() <= 1e-6


async def test_a_prompt_seen_under_the_old_weights_is_not_served_from_their_cache(client, model, trainer):
    prompt = model.prompts(1, length=300)[0]
    await greedy(client, [prompt])
    other = model.perturbed(3)
    await trainer.publish(other)
    model.use(other)
    assert await greedy(client, [prompt]) == model.greedy([prompt], GREEDY.max_tokens)


@pytest.mark.parametrize("pause_per_event_s", [0.0, 0.05])
async def test_requests_that_run_over_a_publish_go_on_under_the_new_weights(client, model, trainer, pause_per_event_s):
    prompts = model.prompts(8)
    sampling = Sampling(max_tokens=400, temperature=1.0, seed=4, ignore_eos=True)
    running = [asyncio.create_task(read_slowly(client, p, sampling, pause_per_event_s)) for p in prompts]
    await asyncio.sleep(0.2)
    other = model.perturbed(5)
    report = await trainer.publish(other)
    answers = [await task for task in running]
    crossed = [(p, *a) for p, a in zip(prompts, answers, strict=True) if len(a[1]) == 2]
    assert crossed, f"no request was running at the commit; the stall was {report.stall_s:.3f} s"
    model.use(model.original)
    by_old = [model.logprobs(p, s.token_ids, 1.0) for p, s, _ in crossed]
    model.use(other)
    by_new = [model.logprobs(p, s.token_ids, 1.0) for p, s, _ in crossed]
    for (_, sample, (old, new)), before, after in zip(crossed, by_old, by_new, strict=True):
        assert new.weight_version == old.weight_version + 1 and old.length + new.length == 400
        assert new.oldest_kv_version == new.weight_version  # frozen requests are prefilled again
        # one token on the wrong side of the cut would differ by about 1
        assert np.abs(sample.logprobs[: old.length] - before[: old.length]).max() < 1e-4
        assert np.abs(sample.logprobs[old.length :] - after[old.length :]).max() < 1e-4


async def test_weights_of_another_model_are_refused_by_name_and_the_old_ones_serve(client, model, trainer):
    before = await greedy(client, model.prompts(2))
    layout = (*client.info.model.tensors[1:], TensorLayout("model.extra.weight", "f32", (3,)))
    epoch = await client.acquire_control("test")
    with pytest.raises(ModelMismatch, match=r"model\.extra\.weight"):
        await trainer.publisher.publish(
            layout, iter(()), [PublishTarget(client.url, epoch)], target_version=1000, timeout_s=30
        )
    assert await greedy(client, model.prompts(2)) == before


async def test_fifty_swaps_take_no_memory(server, client, model, trainer):
    weights = [model.perturbed(7), model.original]
    for i in range(6):
        await trainer.publish(weights[i % 2])
    pids = [server.pid, *server.engine_pids()]
    before = sum(map(anonymous_bytes, pids))
    stalls = [(await trainer.publish(weights[i % 2])).stall_s for i in range(50)]
    grown = sum(map(anonymous_bytes, pids)) - before
    middle, longest = np.median(stalls) * 1e3, max(stalls) * 1e3
    print(f"50 swaps: {grown / 1e6:+.1f} MB, stall median {middle:.0f} ms, longest {longest:.0f} ms")
    assert grown < 8e6


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024
