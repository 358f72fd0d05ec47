"""What vLLM does behind the kit's contract, by numbers: one engine (engine_facts.py) against transformers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_facts import ALPHA, CONTEXT, RANK
from safetensors.torch import save_file
from serve_process import ARCTIC_SERVE, TINY_MODEL, need_environment, server_environ
from served_model import ServedModel

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]  # the first test starts the engine and runs every scenario
MEAN_LIMIT, LIMIT = 5e-6, 1e-4  # in float32; a wrong position, temperature or weight is off by 0.1 and more


@pytest.fixture(scope="module")
def other(model: ServedModel) -> dict[str, torch.Tensor]:
    return model.perturbed(11, scale=0.5)


@pytest.fixture(scope="module")
def adapters(model: ServedModel) -> list[dict[str, torch.Tensor]]:
    """Two adapters of every linear layer, named as PEFT names them."""
    return [adapter_of(model, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, other, adapters) -> dict[str, Any]:
    need_environment()
    work = tmp_path_factory.mktemp("facts")
    save_file({n: t.contiguous() for n, t in other.items() if n != "lm_head.weight"}, work / "other.safetensors")
    for number, tensors in enumerate(adapters, start=1):
        save_file(tensors, work / f"adapter-{number}.safetensors")
    script = Path(__file__).with_name("engine_facts.py")
    done = subprocess.run(
        [str(ARCTIC_SERVE.with_name("python")), str(script), str(TINY_MODEL), str(work)],
        stdout=subprocess.PIPE, text=True, timeout=280, check=True, env=server_environ(),
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def original_weights(model: ServedModel) -> Iterable[None]:
    yield
    model.use(model.original)


def adapter_of(model: ServedModel, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, weight in model.original.items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=draw) * 0.07
            found[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=draw) * 0.07
    return found


def merged(model: ServedModel, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + (alpha / rank) * B @ A for every module of the adapter."""
    weights = dict(model.original)
    for name in adapter:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = adapter[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + ALPHA / RANK * b @ adapter[name]
    return weights


@torch.no_grad()
def all_logprobs(model: ServedModel, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """log_softmax(logits / T) [position, vocabulary]; row i is about the token after ids[i]."""
    return torch.log_softmax(model.module(torch.tensor([ids])).logits[0] / temperature, -1).numpy()


def off(model: ServedModel, ids: list[int], first: int, said: list[float], temperature: float = 1.0) -> float:
    """The largest difference to the logprobs of ids[first:first + len(said)]; their mean is within MEAN_LIMIT."""
    rows = all_logprobs(model, ids, temperature)
    differences = np.abs(np.array([rows[i - 1, ids[i]] for i in range(first, first + len(said))]) - said)
    assert differences.mean() <= MEAN_LIMIT
    return float(differences.max())


def generated_off(model: ServedModel, answer: dict[str, Any], temperature: float = 1.0) -> float:
    prompt = answer["prompt"]
    return off(model, prompt + answer["token_ids"], len(prompt), answer["logprobs"], temperature)


def test_everything_that_this_vllm_can_do_on_a_cpu_is_offered(facts):
    assert facts["capabilities"] == {
        "max_top_logprobs": 100, "prompt_logprobs": True, "score": True, "priority": True, "reset_cache": True,
        "lora": True, "sleep_levels": [], "collectives": ["gloo"],
    }  # fmt: skip


@pytest.mark.parametrize(("key", "temperature"), [("raw", 1.0), ("half", 0.5)])
def test_top_logprobs_are_the_whole_distribution_best_first(facts, model, key, temperature):
    answer = facts["beside"][key]
    ids, logprobs = np.array(answer["top_ids"]), np.array(answer["top_logprobs"])
    assert ids.shape == logprobs.shape == (12, 100) and (np.diff(logprobs) <= 0).all()
    assert (np.sort(ids) == np.arange(100)).all()
    rows = all_logprobs(model, answer["prompt"] + answer["token_ids"], temperature)[len(answer["prompt"]) - 1 : -1]
    assert np.abs(np.take_along_axis(rows, ids, 1) - logprobs).max() <= LIMIT


@pytest.mark.parametrize(("key", "temperature", "asked"), [("raw", 1.0, 300), ("half", 0.5, 40)])
def test_logprobs_of_the_prompt_are_in_the_mode_of_the_request(facts, model, key, temperature, asked):
    answer = facts["beside"][key]
    said, prompt = answer["prompt_logprobs"], answer["prompt"]
    assert len(said) == asked and np.isnan(said).sum() == (asked == 300)
    known = said[1:] if asked == 300 else said
    assert off(model, prompt, 300 - len(known), known, temperature) <= LIMIT


def test_a_prompt_of_one_token_has_no_logprob_and_shaped_sampling_is_refused(facts):
    assert np.isnan(facts["beside"]["single"]["prompt_logprobs"]).tolist() == [True]
    assert facts["beside"]["plain"]["prompt_logprobs"] is None and "top_p" in facts["beside"]["shaped"]


@pytest.mark.parametrize(("key", "first", "temperature"), [("full", 1, 1.0), ("middle", 350, 0.5), ("pair", 1, 1.0)])
def test_a_score_is_what_a_trainer_computes_up_to_the_last_token_of_the_context(facts, model, key, first, temperature):
    answer = facts["scores"][key]
    assert len(answer["logprobs"]) == len(answer["token_ids"]) - first
    assert key != "full" or len(answer["token_ids"]) == CONTEXT
    assert off(model, answer["token_ids"], first, answer["logprobs"], temperature) <= LIMIT
    if answer["top_ids"]:
        rows = all_logprobs(model, answer["token_ids"], temperature)[first - 1 : -1]
        best = np.take_along_axis(rows, np.array(answer["top_ids"]), 1)
        assert np.abs(best - answer["top_logprobs"]).max() <= LIMIT
        assert np.abs(best[:, 0] - rows.max(1)).max() <= LIMIT


def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(facts):
    assert facts["scores"]["hot"].startswith("ValueError: temperature is 1e-06")


def test_cached_prompt_tokens_are_those_of_the_same_salt_and_none_after_a_reset(facts):
    cache = facts["cache"]
    assert cache["hits"] == [0, 256, 0] and cache["freed"] == [4, 0] and cache["after"] == 0


def test_a_reset_leaves_running_requests_alone_or_preempts_them_and_changes_no_token(facts):
    cache = facts["cache"]
    assert cache["refused"].startswith("WrongState: running requests hold KV blocks") and cache["preempted"] > 0
    assert cache["disturbed"]["token_ids"] == cache["undisturbed"]["token_ids"]
    assert (cache["undisturbed"]["num_preemptions"], cache["disturbed"]["num_preemptions"]) == (0, 1)


def test_logprobs_after_a_preemption_are_those_of_a_fresh_prefill(facts, model):
    assert generated_off(model, facts["cache"]["disturbed"]) <= LIMIT


def test_waiting_requests_run_by_priority_not_by_arrival(facts):
    assert facts["priority"] == ["high", "middle", "low"]


def test_adapters_and_the_base_in_one_batch_each_use_their_own_weights(facts, model, adapters):
    for name, weights in (
        ("a", merged(model, adapters[0])),
        ("b", merged(model, adapters[1])),
        ("base", model.original),
    ):
        answer = facts["adapters"][name]
        model.use(weights)
        assert generated_off(model, answer) <= LIMIT, name
        assert off(model, answer["prompt"], 21, answer["prompt_logprobs"]) <= LIMIT, name


def test_a_score_is_that_of_its_adapter(facts, model, adapters):
    answer = facts["adapters"]["scored"]
    model.use(merged(model, adapters[1]))
    assert off(model, answer["token_ids"], 1, answer["logprobs"], 0.5) <= LIMIT


def test_a_running_request_goes_on_under_the_adapter_that_replaced_its_own(facts, model, adapters):
    answer = facts["adapters"]["running"]
    ids, cut, start = answer["prompt"] + answer["token_ids"], answer["cut"], len(answer["prompt"])
    model.use(merged(model, adapters[0]))
    assert off(model, ids, start, answer["logprobs"][:cut]) <= LIMIT
    model.use(merged(model, adapters[1]))
    assert off(model, ids, start + cut, answer["logprobs"][cut:]) <= LIMIT


def test_an_adapter_that_is_not_loaded_is_never_the_base(facts):
    for key in ("unknown", "dropped"):
        assert facts["adapters"][key] == "UnknownPolicy: policy 'a' is not loaded: publish its adapter first"
    assert "the limit is 2" in facts["adapters"]["too_many"]


def test_the_base_answers_as_before_from_blocks_in_which_an_adapter_of_nan_left_its_kv(facts):
    broken = facts["broken_adapter"]
    assert np.isnan(broken["bad"]).all()
    for answer in broken["after"]:
        assert answer["token_ids"] == broken["before"]["token_ids"]
        assert np.abs(np.subtract(answer["logprobs"], broken["before"]["logprobs"])).max() < 1e-5


def test_a_cut_is_exact_when_readers_lag_behind_the_engine(facts, model, other):
    requests = facts["swap"]
    assert sum(r["made_at_pause"] - r["seen_at_pause"] for r in requests) > 0, "the readers did not lag"
    tellable = 0
    for r in requests:
        ids, logprobs, cut = np.asarray(r["token_ids"]), np.asarray(r["logprobs"]), r["made_at_pause"]
        assert len(ids) == len(logprobs) == 300
        model.use(model.original)
        before = model.logprobs(r["prompt"], ids, 1.0)
        model.use(other)
        after = model.logprobs(r["prompt"], ids, 1.0)
        assert np.abs(logprobs[:cut] - before[:cut]).max() < 1e-4
        assert np.abs(logprobs[cut:] - after[cut:]).max() < 1e-4
        tellable += abs(logprobs[cut] - before[cut]) > 1e-3 and abs(logprobs[cut - 1] - after[cut - 1]) > 1e-3
    assert tellable >= 3, "the two weights agree around the cuts: an error of one token would not show"


def test_weights_that_another_process_broadcasts_are_served_and_until_then_the_old_ones(facts, model, other):
    gloo = facts["gloo"]
    for key in ("before", "left", "joined"):
        assert gloo[key]["token_ids"] == gloo["before"]["token_ids"], key
    model.use(other)
    assert generated_off(model, gloo["joined"]) <= LIMIT
    model.use(model.original)
    assert generated_off(model, gloo["received"]) <= LIMIT and gloo["trainer"] == 0


def test_a_trainer_that_does_not_listen_is_named_and_stops_nothing(facts):
    assert facts["gloo"]["silent"].startswith("ConnectionError: the trainer does not listen at 127.0.0.1:")
