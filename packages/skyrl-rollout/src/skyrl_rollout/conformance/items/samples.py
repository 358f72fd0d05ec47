"""Items 14 to 16: several samples, stop strings and the end of the context."""

from __future__ import annotations

import asyncio

import grpc

from skyrl_rollout.conformance.answers import Answer
from skyrl_rollout.conformance.item import Failed, expect
from skyrl_rollout.conformance.items.tokens import check_whole
from skyrl_rollout.conformance.stubs import refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.v1 import generation_pb2 as pb

LETTERS = [chr(code) for code in range(32, 127)]
STOP_TOKENS = 12  # how far a stop string is looked for


async def each_sample_finishes_once(target: Target) -> None:
    """Item 14."""
    sampling = {"temperature": 1.0, "seed": 41}
    first = await target.answer(target.ask(12, num_samples=4, sampling=sampling))
    check_whole(first)
    expect(sorted(first.finished) == [0, 1, 2, 3], f"samples {sorted(first.finished)} finished, expected 0 to 3")
    expect(len({tuple(first.tokens(i)) for i in range(4)}) > 1, "4 samples at T=1 are equal: all have the same seed")
    if not target.offers("deterministic_seed"):
        return
    again = await target.answer(target.ask(12, num_samples=4, sampling=sampling))
    single = await target.answer(target.ask(12, sampling={**sampling, "seed": 43}))
    for i in range(4):
        expect(again.tokens(i) == first.tokens(i), f"sample {i} of a seeded request differs when it is repeated")
    expect(single.tokens() == first.tokens(2), "sample 2 of seed 41 is not the sample of seed 43 (seed + i)")


async def stop_string_over_two_deltas(target: Target) -> None:
    """Item 15. Which text a token stands for is learned by asking, because text never crosses the seam."""
    target.need("stop_strings")
    for seed in range(1, 6):
        free, firsts = await first_places(target, seed)
        pairs = [(a + b, i) for a, i in firsts.items() for b, j in firsts.items() if j == i + 1]
        for string, at in pairs[:20]:
            answer = await target.answer(stopping(target, seed, [string]))
            if answer.reason() != "STOP_STRING":
                continue  # the first token goes on after that letter
            check_whole(answer)
            got = len(answer.tokens())
            expect(answer.end().stop_string == string, f"matched {answer.end().stop_string!r}, expected {string!r}")
            if got != at + 2:
                continue  # matched earlier, in one token
            expect(answer.tokens() == free.tokens()[:got], "tokens differ from those without the stop string")
            return
    raise Failed("no stop string of two letters that lie in two tokens was ever matched, expected STOP_STRING")


async def first_places(target: Target, seed: int) -> tuple[Answer, dict[str, int]]:
    """The answer without stop strings, and for each letter the token in which it first ends."""
    free = await target.answer(stopping(target, seed, []))
    answers = await asyncio.gather(*(target.answer(stopping(target, seed, [letter])) for letter in LETTERS))
    places = {
        letter: len(answer.tokens()) - 1
        for letter, answer in zip(LETTERS, answers, strict=True)
        if answer.reason() == "STOP_STRING"
    }
    return free, places


def stopping(target: Target, seed: int, strings: list[str]) -> pb.GenerateRequest:
    """A seeded request with these stop strings."""
    drawn = {"temperature": 1.0, "seed": seed} if target.offers("deterministic_seed") else {"temperature": 0.0}
    prompt = target.prompt(seed=seed)
    return target.ask(STOP_TOKENS, prompt=prompt, sampling={**drawn, "stop_strings": strings})


async def context_ends(target: Target) -> None:
    """Item 16."""
    for length in (target.context, target.context + 1):
        await refused(
            target.read(target.ask(4, prompt=target.prompt(length))).call,
            grpc.StatusCode.INVALID_ARGUMENT,
            what=f"a prompt of {length} tokens for a context of {target.context}",
        )
    answer = await target.answer(target.ask(100, prompt=target.prompt(target.context - 4)))
    check_whole(answer)
    expect(
        len(answer.tokens()) == 4 and answer.reason() == "LENGTH",
        f"4 tokens before the end of the context: {len(answer.tokens())} came, reason {answer.reason()}",
    )
