"""A reference server that breaks one promise of the protocol: `python lying_server.py LIE --listen ADDR`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.server import ServerOptions, convert, serve, staging, swapping
from skyrl_rollout.server.engine import EngineRequest, PromptRead, SampleEnded, TokensMade
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.state import ServerState
from skyrl_rollout.tokens import LogprobMode
from skyrl_rollout.weights.manifest import TensorLayout


def answers_raw_for_temperature() -> None:
    """4: a logprob of another distribution than was asked for."""
    generate = ReferenceEngine.generate

    async def lying(
        self: ReferenceEngine, request: EngineRequest
    ) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded]:
        mode = LogprobMode.RAW if request.mode is LogprobMode.TEMPERATURE else request.mode
        async for item in generate(self, replace(request, mode=mode)):
            yield item

    ReferenceEngine.generate = lying  # type: ignore[method-assign]


def zeroes_unknown_logprobs() -> None:
    """3: 0.0 in the place of NaN."""
    generate = ReferenceEngine.generate

    async def lying(
        self: ReferenceEngine, request: EngineRequest
    ) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded]:
        async for item in generate(self, request):
            yield replace(item, logprobs=np.nan_to_num(item.logprobs)) if isinstance(item, TokensMade) else item

    ReferenceEngine.generate = lying  # type: ignore[method-assign]


def keeps_the_old_weights() -> None:
    """34, 35: a commit that is answered and not done."""

    async def lying(self: ReferenceEngine, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        for _ in tensors:
            pass

    ReferenceEngine.load_weights = lying  # type: ignore[method-assign]


def cuts_where_the_reader_is() -> None:
    """24: the spans are cut where a reader three tokens behind the engine is."""
    made = ReferenceEngine.tokens_made

    def lying(self: ReferenceEngine) -> dict[str, list[int]]:
        return {request_id: [max(0, n - 3) for n in counts] for request_id, counts in made(self).items()}

    ReferenceEngine.tokens_made = lying  # type: ignore[method-assign]


def takes_any_bytes() -> None:
    """36: Seal does not look."""
    swapping.verify = staging.verify = lambda *given: None  # type: ignore[assignment]


def falls_back_to_the_base() -> None:
    """45: an unknown policy is served by the base."""
    ServerState.version_of = lambda self, policy_id: self.versions.get(policy_id, 0)  # type: ignore[method-assign]


def takes_one_id_twice() -> None:
    """8, 9: the identity of a request is not checked, and each call is a run of its own."""
    attach: Callable[..., Any] = RunRegistry.attach

    def lying(self: RunRegistry, request: Any, resume_after: int) -> Any:
        self._active.pop(request.request_id, None)
        return attach(self, request, resume_after)

    RunRegistry.attach = lying  # type: ignore[method-assign]


def defaults_to_sixteen_tokens() -> None:
    """6: unset max_tokens."""
    read = convert.generation_request

    def lying(m: Any) -> Any:
        request = read(m)
        return replace(request, sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens or 16))

    convert.generation_request = lying


def refuses_with_a_wrong_code() -> None:
    """9: INVALID_ARGUMENT where ALREADY_EXISTS is promised."""
    attach = RunRegistry.attach

    def lying(self: RunRegistry, request: Any, resume_after: int) -> Any:
        known = self._active.get(request.request_id) or self._ended.get(request.request_id)
        if known is not None and known.request.identity != request.identity:
            raise InvalidRequest("no")
        return attach(self, request, resume_after)

    RunRegistry.attach = lying  # type: ignore[method-assign]


LIES: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        answers_raw_for_temperature, zeroes_unknown_logprobs, keeps_the_old_weights, cuts_where_the_reader_is,
        takes_any_bytes, falls_back_to_the_base, takes_one_id_twice, defaults_to_sixteen_tokens,
        refuses_with_a_wrong_code,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("lie", choices=LIES)
    parser.add_argument("--listen", required=True)
    args = parser.parse_args()
    LIES[args.lie]()

    async def build() -> ReferenceEngine:
        return ReferenceEngine(canary=True)

    return asyncio.run(serve(build, ServerOptions(args.listen, drain_grace_s=0.2)))


if __name__ == "__main__":
    sys.exit(main())
