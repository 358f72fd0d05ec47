"""How the protocol's sampling parameters become vLLM's, with every default of the model's own files left out."""

from __future__ import annotations

from skyrl_rollout.server.engine import EngineRequest
from skyrl_rollout.tokens import Sampling
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from skyrl_arctic_inference.engine.spans import GivenSpan

SEED_MODULUS = 1 << 64  # torch generators take unsigned 64 bits


def refuse_changed(sampling: Sampling, *, vocab_size: int) -> None:
    """Raises ValueError for values that vLLM would clamp, refuse late, or that would crash its sampler."""
    if not (sampling.is_greedy or 0.01 <= sampling.temperature <= 2.0):
        raise ValueError(
            f"temperature is {sampling.temperature:g}: vLLM samples exactly from 0.01 to 2.0, and 0 is greedy"
        )
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2.0 <= getattr(sampling, name) <= 2.0:
            raise ValueError(f"{name} is {getattr(sampling, name):g}: vLLM takes -2.0 to 2.0")
    if any(not s for s in sampling.stop_strings):
        raise ValueError("stop_strings holds an empty string: it would match everywhere, leave it out")
    outside = [t for t in (*sampling.stop_token_ids, *sampling.logit_bias) if not 0 <= t < vocab_size]
    if outside:
        raise ValueError(f"token ids {sorted(set(outside))[:5]} lie outside the vocabulary [0, {vocab_size})")


def vllm_sampling(
    request: EngineRequest, *, sample_index: int, eos_token_ids: tuple[int, ...], prompt: GivenSpan | None
) -> SamplingParams:
    """The parameters of one sample; sample i of a seeded request draws from seed + i, sample 0 reads the prompt.

    End tokens are passed as stop tokens, so that which of them ended a sample is always known.
    """
    sampling = request.sampling
    span = prompt if sample_index == 0 else None
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    seed = None if sampling.seed is None or sampling.is_greedy else (sampling.seed + sample_index) % SEED_MODULUS
    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        seed=seed,
        stop=list(sampling.stop_strings),
        stop_token_ids=sorted(stops),
        ignore_eos=True,  # of the tokenizer; the model's own end tokens are among stop_token_ids
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=request.top_logprobs,  # 0: the sampled token's only
        prompt_logprobs=None if span is None else 0,
        extra_args=None if span is None else span.as_extra_args(),
        flat_logprobs=True,
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.DELTA,
    )
