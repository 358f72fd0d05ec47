"""Which given tokens need a logprob, and what the logits are divided by: what front and workers agree on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from skyrl_rollout.server.engine import EngineRequest, EngineScoreRequest
from skyrl_rollout.tokens import GREEDY, LogprobMode

from skyrl_arctic_inference.engine.logprobs import acting

KEY = "skyrl_given"
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0


@dataclass(frozen=True)
class GivenSpan:
    """Tokens [first, end) of prompt + `after`, first >= 1, each given all tokens before it.

    after: one token that follows the prompt and is not itself computed, -1 for none. temperature: logits are divided
    by it.
    """

    first: int
    after: int
    temperature: float

    def as_extra_args(self) -> dict[str, Any]:
        """What travels in vLLM's `SamplingParams.extra_args`."""
        return {KEY: asdict(self)}

    @staticmethod
    def of(extra_args: dict[str, Any]) -> GivenSpan:
        return GivenSpan(**extra_args[KEY])


def refuse_inexact_prompt(request: EngineRequest) -> None:
    """Raises ValueError where prompt logprobs in the mode asked for are not over the full vocabulary."""
    names = acting(request.sampling) if request.prompt_last_n and request.mode is LogprobMode.SAMPLING else ()
    if names:
        raise ValueError(
            f"prompt logprobs in mode SAMPLING cannot be computed together with {', '.join(names)}: "
            f"the prompt was not drawn from that distribution, leave these out or ask for TEMPERATURE"
        )


def refuse_inexact_score(request: EngineScoreRequest) -> None:
    """Raises ValueError for a temperature that float32 logits cannot be divided by; every mode is exact."""
    if request.mode is LogprobMode.RAW or request.temperature == GREEDY:
        return
    if not LEAST_TEMPERATURE <= request.temperature <= MOST_TEMPERATURE:
        raise ValueError(
            f"temperature is {request.temperature:g}: logits are divided by {LEAST_TEMPERATURE:g} to "
            f"{MOST_TEMPERATURE:g}, and 0 leaves them as they are"
        )


def prompt_span(request: EngineRequest) -> GivenSpan | None:
    """The last tokens of the prompt that need a logprob and have a token before them; None for none."""
    length = len(request.prompt_token_ids)
    first = max(length - request.prompt_last_n, 1)
    return GivenSpan(first, -1, divisor(request.mode, request.sampling.temperature)) if first < length else None


def score_span(request: EngineScoreRequest) -> GivenSpan:
    """All tokens but the last are the prompt: its hidden states tell everything, and it always fits the context."""
    return GivenSpan(request.score_from, int(request.token_ids[-1]), divisor(request.mode, request.temperature))


def divisor(mode: LogprobMode, temperature: float) -> float:
    """What the logits are divided by: RAW and greedy leave them as they are."""
    return 1.0 if mode is LogprobMode.RAW or temperature == GREEDY else temperature
