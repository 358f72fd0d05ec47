"""How `generator.sampling_params` become the sampling parameters of a request, and which logprobs then make sense."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from skyrl_rollout.tokens import LogprobMode, Sampling

# These follow from other keys: the turn's length, and the run's seed.
_NOT_FREE = ("max_tokens", "seed")


def to_sampling(params: Any, *, key: str) -> Sampling:
    """The request's parameters. `key` is the section's name in errors.

    Raises ValueError for a name in `additional_kwargs` that no sampling parameter has.
    """
    extra = dict(params.additional_kwargs or {})
    free = [f.name for f in fields(Sampling) if f.name not in _NOT_FREE]
    for name in extra:
        if name not in free:
            raise ValueError(f"{key}.additional_kwargs.{name}: no such sampling parameter; known: {', '.join(free)}")
    values = {
        "max_tokens": params.max_generate_length,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop_strings": tuple(params.stop or ()),
    } | extra
    for name in ("stop_strings", "stop_token_ids"):
        given = values.get(name, ())
        # one alone is a list of one: a text would fall apart into its characters
        values[name] = (given,) if isinstance(given, str | int) else tuple(given)
    return Sampling(**values)


def logprob_mode(sampling: Sampling) -> LogprobMode:
    """TEMPERATURE, which a trainer recomputes, where tokens are drawn from softmax(logits / T) itself; else SAMPLING,
    the distribution really drawn from (a forced minimum length also changes it)."""
    if sampling.is_greedy or (sampling.is_full_distribution and sampling.min_tokens == 0):
        return LogprobMode.TEMPERATURE
    return LogprobMode.SAMPLING
