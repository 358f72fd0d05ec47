"""Which sums the arithmetic task asks, how they are written, and which of them are kept for evaluation.

The one home of the format: the tiny model's warm-up, the data set and the environment all read it from here.
A prompt is `ab+c=` (two digits, plus, one digit); the answer is the sum as three zero-padded digits: `47+8=` -> `055`.
There are 1000 such sums; 100 of them, picked once by a fixed seed, are the evaluation split and are never trained on.
"""

import random
from typing import Literal, NamedTuple

Split = Literal["train", "eval"]

ANSWER_CHARS = 3
NUM_EVAL_PROBLEMS = 100
_SPLIT_SEED = 20260801


class Problem(NamedTuple):
    """One sum: the text that the model reads and the text that it should write."""

    prompt: str
    answer: str


def pose(first: int, second: int) -> Problem:
    """Write the sum of a number in 0..99 and a digit in 0..9. Raises ValueError outside these."""
    if not (0 <= first <= 99 and 0 <= second <= 9):
        raise ValueError(f"a sum adds 0..99 and 0..9, got {first} and {second}")
    return Problem(f"{first:02d}+{second}=", f"{first + second:03d}")


ALL_PROBLEMS: tuple[Problem, ...] = tuple(pose(first, second) for first in range(100) for second in range(10))


def _split() -> dict[Split, tuple[Problem, ...]]:
    held_out = set(random.Random(_SPLIT_SEED).sample(range(len(ALL_PROBLEMS)), NUM_EVAL_PROBLEMS))
    return {
        "train": tuple(p for i, p in enumerate(ALL_PROBLEMS) if i not in held_out),
        "eval": tuple(p for i, p in enumerate(ALL_PROBLEMS) if i in held_out),
    }


PROBLEMS: dict[Split, tuple[Problem, ...]] = _split()


def problem(rng: random.Random, split: Split = "train") -> Problem:
    """Draw one problem of the split, uniformly, with replacement."""
    return rng.choice(PROBLEMS[split])


def is_correct(answer: str, response: str) -> bool:
    """Whether the response, without surrounding white space, is exactly the answer."""
    return response.strip() == answer
