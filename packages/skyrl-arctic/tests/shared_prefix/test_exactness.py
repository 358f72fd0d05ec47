"""Is a group computed with its prompt once what its n separate sequences are, forward and backward?"""

from __future__ import annotations

import pytest
import torch
from arctic_rl.shared_prefix import forward
from peft import LoraConfig, get_peft_model
from shared_prefix.tiny import FAMILIES, TEMPERATURE, batch_of, furthest, gradients, model_of, one_by_one
from skyrl.train.algorithms.objective import micro_loss
from skyrl.train.config import AlgorithmConfig
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.minibatch import prepare

GROUPS = {
    "even": [(0, 5, 4)] * 3,
    "ragged": [(0, 7, 3), (0, 7, 9), (0, 7, 1)],
    "single row": [(0, 6, 5)],
    "interleaved": [(4, 5, 3), (1, 8, 2), (4, 5, 6), (1, 8, 7), (9, 3, 4), (4, 5, 3)],
    "one token each": [(0, 1, 1), (0, 1, 1)],
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def shared(model: object, batch: TrajectoryBatch, budget_bytes: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_T, entropy_T = forward.token_logprobs(
        model, batch, temperature=TEMPERATURE, with_entropy=True, budget_bytes=budget_bytes
    )
    assert entropy_T is not None
    return logprobs_T, entropy_T


def same(model: object, batch: TrajectoryBatch) -> None:
    """Outputs to 1e-12 and gradients to 1e-11, in float64."""
    weights_T = torch.linspace(-1, 1, batch.loss_mask_T.numel(), dtype=torch.float64)
    wanted, found = one_by_one(model, batch), shared(model, batch)
    for w, f in zip(wanted, found, strict=True):
        assert f.dtype == torch.float64 and torch.allclose(f, w, rtol=0, atol=1e-12)
    # both outputs at once: neither may spoil the other's gradient
    losses = [
        (logprobs_T * weights_T).sum() + (entropy_T * weights_T**2).sum() for logprobs_T, entropy_T in (wanted, found)
    ]
    assert furthest(gradients(model, losses[1]), gradients(model, losses[0])) < 1e-11


@pytest.mark.parametrize("groups", GROUPS)
def test_outputs_and_gradients_are_those_of_separate_sequences(groups: str) -> None:
    model = model_of("qwen3")
    forward.prepare(model)
    same(model, batch_of(GROUPS[groups]))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_covered_family(family: str) -> None:
    model = model_of(family, tie_word_embeddings=family == "llama")
    forward.prepare(model)
    same(model, batch_of(GROUPS["interleaved"]))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_float32_logprobs(family: str) -> None:
    model = model_of(family, torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.div_(6.0)
    forward.prepare(model)
    batch = batch_of(GROUPS["interleaved"])
    for wanted, found in zip(one_by_one(model, batch), shared(model, batch), strict=True):
        assert found.dtype == torch.float32 and torch.allclose(found, wanted, rtol=0, atol=1e-6)


def test_separate_sequences_before_and_after_it_is_prepared_are_the_same() -> None:
    model, batch = model_of("qwen3"), batch_of(GROUPS["ragged"])
    before = one_by_one(model, batch)[0]
    forward.prepare(model)
    assert torch.equal(one_by_one(model, batch)[0], before)
    padded = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    asked = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(asked, model(input_ids=padded, attention_mask=mask, use_cache=False).logits)


def test_a_group_split_over_micro_batches_adds_up() -> None:
    model, batch = model_of("qwen3"), batch_of(GROUPS["interleaved"])
    forward.prepare(model)
    whole_T = shared(model, batch)[0]
    whole = gradients(model, whole_T.square().sum())
    parts, loss = [[0, 3], [1, 2, 4], [5]], torch.zeros((), dtype=torch.float64)
    for part in parts:
        logprobs_T = shared(model, batch.select(part))[0]
        assert torch.allclose(logprobs_T, whole_T[batch.response_index(part)], rtol=0, atol=1e-12)
        loss = loss + logprobs_T.square().sum()
    assert furthest(gradients(model, loss), whole) < 1e-11


def test_equal_prompts_of_two_groups_and_two_prompts_of_one_group() -> None:
    model = model_of("qwen3")
    forward.prepare(model)
    same(model, batch_of([(0, 5, 3), (1, 5, 4), (0, 5, 2), (1, 5, 1)], equal_prompts=True))
    same(model, batch_of([(0, 5, 3), (0, 8, 4), (0, 5, 2)]))  # the turns of an episode have one id


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    model = model_of("qwen3")
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    forward.prepare(model)
    same(model, batch_of(GROUPS["ragged"]))


def test_a_lora_adapter() -> None:
    model = model_of("qwen3")
    forward.prepare(model)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).double()
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    assert all("lora" in name for name, p in wrapped.named_parameters() if p.requires_grad)
    same(wrapped, batch_of(GROUPS["interleaved"]))


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [("regular", "token_mean"), ("regular", "prompt_mean"), ("gspo", "sequence_mean"), ("cispo", "token_mean")],
)
def test_losses_and_their_reductions(loss: str, reduction: str) -> None:
    algorithm = AlgorithmConfig(
        policy_loss_type=loss, loss_reduction=reduction, use_kl_loss=True, use_entropy_loss=True, entropy_loss_coef=0.1
    )
    model = model_of("qwen3")
    forward.prepare(model)
    batch, counts = prepare(batch_of(GROUPS["interleaved"]), algorithm, world_size=1)
    wanted, shares = micro_loss(batch, *one_by_one(model, batch), algorithm, num_tokens=counts.num_tokens)
    # the groups cut in two, so that a reduction over what is packed together would show
    found = torch.zeros((), dtype=torch.float64)
    for part in ([0, 1, 2], [3, 4, 5]):
        micro = batch.select(part)
        found = found + micro_loss(micro, *shared(model, micro), algorithm, num_tokens=counts.num_tokens)[0]
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert furthest(gradients(model, found), gradients(model, wanted)) < 1e-11
    assert float(shares["policy/policy_kl"]) != 0


def test_on_policy_the_ratio_is_one() -> None:
    model, batch = model_of("qwen3"), batch_of(GROUPS["interleaved"])
    forward.prepare(model)
    with torch.no_grad():
        old_T = shared(model, batch)[0]
    new_T = shared(model, batch.select([0, 1, 2, 3, 4, 5]))[0]
    assert torch.equal(torch.exp(new_T - old_T), torch.ones_like(old_T))
