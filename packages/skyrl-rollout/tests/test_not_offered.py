"""What a server does not offer is refused by the name of the capability, by the client before anything is sent."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from raw_calls import PROMPT, RawCalls, ask, refused
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import MissingCapability
from skyrl_rollout.reference.process import ServedProcess
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.v1 import generation_pb2 as pb

SCRIPT = str(Path(__file__).with_name("plain_server.py"))
OPTION = Struct()
OPTION.update({"token_delay_s": 1})


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess([sys.executable, SCRIPT]) as process:
        yield process


@pytest.fixture
async def client(server: ServedProcess) -> AsyncIterator[RolloutClient]:
    async with await RolloutClient.connect(server.url) as connected:
        yield connected


@pytest.mark.parametrize(
    ("change", "capability"),
    [
        ({"extras": [pb.EXTRA_ROUTED_EXPERTS]}, "extras"),
        ({"priority": 1}, "priority"),
        ({"backend_options": OPTION}, "backend_options"),
        ({"logprobs": pb.LogprobOptions(top_k=5)}, "max_top_logprobs"),
        ({"logprobs": pb.LogprobOptions(prompt_last_n=1)}, "prompt_logprobs"),
        ({"sampling": {"stop_strings": ["x"]}}, "stop_strings"),
    ],
)
async def test_a_request_is_refused_with_the_name_of_the_capability(
    calls: RawCalls, change: dict, capability: str
) -> None:
    error = await refused(calls.stream(ask(**change)))
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY")
    assert error.details["capability"] == capability


async def test_scores_and_modes_that_are_not_offered_are_refused(calls: RawCalls) -> None:
    score = await refused(calls.rollout.Score(pb.ScoreRequest(token_ids=PROMPT.tobytes(), score_from=1), timeout=5))
    assert (score.code, score.details["capability"]) == (grpc.StatusCode.UNIMPLEMENTED, "score")
    mode = await refused(calls.stream(ask(logprobs=pb.LogprobOptions(mode=pb.LOGPROB_MODE_TEMPERATURE))))
    assert (mode.code, "TEMPERATURE" in mode.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (Sampling(stop_strings=("###",)), {}, r"stopping at \['###'\].*capability stop_strings"),
        (Sampling(), {"top_logprobs": 2}, "capability max_top_logprobs"),
        (Sampling(), {"prompt_last_n": 2}, "capability prompt_logprobs"),
        (Sampling(), {"priority": -1}, "capability priority"),
        (Sampling(), {"extras": ("routed_experts",)}, "extra output 'routed_experts'.*capability extras"),
        (Sampling(), {"backend_options": {"token_delay_s": 1}}, "option 'token_delay_s'.*capability backend_options"),
    ],
)
async def test_the_client_refuses_before_it_sends(
    client: RolloutClient, sampling: Sampling, options: dict, message: str
) -> None:
    with pytest.raises(MissingCapability, match=message):
        await client.generate([1], sampling, mode=LogprobMode.RAW, timeout_s=5, **options)


async def test_the_client_refuses_to_score_before_it_sends(client: RolloutClient) -> None:
    with pytest.raises(MissingCapability, match="capability score"):
        await client.score([1, 2], 1, mode=LogprobMode.RAW, timeout_s=5)


async def test_an_engine_that_tells_nothing_of_its_prompt_starts_at_once(client: RolloutClient) -> None:
    generation = await client.generate([1] * 40, Sampling(max_tokens=3), mode=LogprobMode.RAW, timeout_s=5)
    assert (generation.cached_prompt_tokens, generation.prompt_logprobs) == (0, None)
