"""Does each flag of `skyrl-serve` mean what it says, and is one that cannot be refused by name?"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
import skyrl.train.quickstart
from skyrl.serve.batch import Limits
from skyrl.serve.cli import add_engine_options, apply_engine_arguments
from skyrl.serve.engine import TransformersEngine
from skyrl.serve.model import ServedModel

TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    args = parser.parse_args(["--model", "unread", *flags])
    apply_engine_arguments(args)
    return args


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-top-logprobs", "-1"), "--max-top-logprobs is -1, expected 0 to 4096"),
        (("--max-num-seqs", "0"), "--max-num-seqs is 0, expected at least 1"),
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization is 1.5"),
        (("--kv-cache-gib", "0"), "--kv-cache-gib is 0"),
        (("--engine-arg", "max_num_seqs=many"), "expected a value of type int"),
        (("--engine-arg", "swap_space=4"), "known here are max_model_len"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_can(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parsed(*flags)


def test_an_engine_argument_wins_over_the_flag_of_its_name() -> None:
    assert parsed("--max-num-seqs", "7", "--engine-arg", "max_num_seqs=9").max_num_seqs == 9


async def test_so_many_top_logprobs_are_offered_as_were_asked_for_and_there_are_tokens() -> None:
    model = await asyncio.to_thread(ServedModel, TINY_MODEL, device="cpu", dtype="auto", max_context=None)
    for most in (3, 4096):
        engine = TransformersEngine(model, Limits(), max_top_logprobs=most)
        assert engine.capabilities.max_top_logprobs == min(most, model.identity.vocab_size)
        await engine.close()
