"""Which logprob modes vLLM can answer exactly for given parameters; anything else is refused, never approximated.

The engine runs with `logprobs_mode="processed_logprobs"`: what it returns is log_softmax of the logits after
penalties, bias, temperature, min-p, top-k and top-p. That is SAMPLING always, TEMPERATURE where only the temperature
acts, RAW where nothing acts. Greedy has no temperature, so it answers log_softmax(logits) in all three.
"""

from __future__ import annotations

from skyrl_rollout.tokens import LogprobMode, Sampling

INERT_WHEN_GREEDY = frozenset({"top_p", "top_k", "min_p"})


def acting(sampling: Sampling) -> list[str]:
    """Names of the parameters, besides the temperature, that change the distribution tokens are drawn from."""
    active = {
        "top_p": sampling.top_p < 1.0,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0.0,
        "min_tokens": sampling.min_tokens > 0,  # end tokens are masked until then
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "logit_bias": bool(sampling.logit_bias),
    }
    return [name for name, on in active.items() if on and not (sampling.is_greedy and name in INERT_WHEN_GREEDY)]


def refuse_inexact(mode: LogprobMode, sampling: Sampling) -> None:
    """Raises ValueError, naming the parameters in the way, where `mode` cannot be computed exactly."""
    if mode is LogprobMode.SAMPLING:
        return
    names = acting(sampling)
    if names:
        raise ValueError(
            f"logprob mode {mode.name} is over the full vocabulary and cannot be computed together with "
            f"{', '.join(names)}: leave these out, or ask for SAMPLING"
        )
    if mode is LogprobMode.RAW and not sampling.is_greedy and sampling.temperature != 1.0:
        raise ValueError(
            f"logprob mode RAW cannot be computed at temperature {sampling.temperature:g}: "
            f"ask for TEMPERATURE, or sample at 1.0"
        )
