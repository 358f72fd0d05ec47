"""Does a server survive any bytes on any RPC: no crash, no hang, no growth, and a refusal that is not INTERNAL?

A tenth of the count runs in CI; the long tier sends all 100,000 messages.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc.aio
import pytest
from fuzz_messages import METHODS, damaged, requests, with_epoch
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from held import Life
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.weights import inline
from skyrl_rollout.weights.manifest import content_digest

VARIANTS = 9  # damaged forms sent beside every message that was built
READ_MESSAGES = 2
CALL_S = 0.5
ALIVE_S = 10.0
GROWTH_BYTES = 64 << 20
LIMITS = (
    "--max-context",
    "64",
    "--max-concurrent",
    "64",
    "--request-retention-s",
    "1",
    "--delta",
    "--logits",
    "canary",
)
ALWAYS_WRONG = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


class Fuzzed:
    """One server, its channel, and how it answered."""

    def __init__(self, server: ReferenceServer, runner: asyncio.Runner) -> None:
        self.server, self._runner = server, runner
        self.sent = 0
        self.different: set[tuple[str, bytes]] = set()
        self.codes: Counter[str] = Counter()
        self._channel = runner.run(self._open())
        self._epoch = 1
        self._life = Life(server.pid)

    async def _open(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.server.target, options=[("grpc.use_local_subchannel_pool", 1)])

    def close(self) -> None:
        self._runner.run(self._channel.close())

    @property
    def growth_bytes(self) -> int:
        """By how much the server's resident memory grew after the first fifth of the examples."""
        return self._life.growth_bytes

    def send(self, method: MethodDescriptor, message: Message, seed: int) -> None:
        """The message and those of its damaged forms that were never sent, all at once; AssertionError for an answer
        that no input may cause."""
        whole = with_epoch(message, self._epoch).SerializeToString()
        forms = {(method.name, content_digest(data)): data for data in damaged(whole, seed + self.sent, VARIANTS)}
        variants = [whole, *(data for form, data in forms.items() if form not in self.different)]
        self.different |= {(method.name, content_digest(whole)), *forms}
        self.sent += len(variants)
        for data, (code, said) in zip(variants, self._runner.run(self._all(method, variants)), strict=True):
            self.codes[f"{method.name} {code.name}"] += 1
            assert code not in ALWAYS_WRONG, f"{method.full_name} answers {code.name} ({said}) to {data!r}"
        self._life.look()

    async def _all(self, method: MethodDescriptor, variants: list[bytes]) -> list[tuple[grpc.StatusCode, str]]:
        answers = await asyncio.gather(*(self._one(method, data) for data in variants))
        ask = self._channel.unary_unary("/skyrl_rollout.v1.EngineService/GetServerInfo")
        info = control_pb2.GetServerInfoResponse.FromString(await ask(b"", timeout=ALIVE_S))
        self._epoch = max(info.highest_trainer_epoch, 1)
        return answers

    async def _one(self, method: MethodDescriptor, data: bytes) -> tuple[grpc.StatusCode, str]:
        answer = await self._once(method, data)
        while answer[1] == inline.LOST_STATUS:  # of the client, in place of the server's answer
            answer = await self._once(method, data)
        return answer

    async def _once(self, method: MethodDescriptor, data: bytes) -> tuple[grpc.StatusCode, str]:
        path = f"/{method.containing_service.full_name}/{method.name}"
        try:
            if method.client_streaming:
                await self._channel.stream_unary(path)(_twice(data), timeout=CALL_S)
            elif method.server_streaming:
                call = self._channel.unary_stream(path)(data, timeout=CALL_S)
                for _ in range(READ_MESSAGES):
                    if await call.read() is grpc.aio.EOF:
                        break
                call.cancel()
            else:
                await self._channel.unary_unary(path)(data, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""


async def _twice(data: bytes) -> AsyncIterator[bytes]:
    yield data
    yield data


@contextmanager
def fuzzed_server() -> Iterator[Fuzzed]:
    with asyncio.Runner() as runner, ReferenceServer(*LIMITS) as server:
        fuzzed = Fuzzed(server, runner)
        yield fuzzed
        fuzzed.close()
        assert server.alive, server.last_lines()
        assert server.stop() == 0, server.last_lines()


def examples_of(method: MethodDescriptor, count: int, fuzzed: Fuzzed) -> Callable[[], None]:
    """Sends up to `count` messages to one RPC, each with its damaged forms, whenever it is called."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(method), st.integers(0, 2**32))
    def send(message: Message, seed: int) -> None:
        fuzzed.send(method, message, seed)

    return send


def send_many(methods: Sequence[MethodDescriptor], count: int) -> None:
    """`count` different messages, or a few more, over these RPCs in turn, to one server."""
    each = -(-count // len(methods))
    with fuzzed_server() as fuzzed:
        for method in methods:
            send = examples_of(method, each // (VARIANTS + 1), fuzzed)
            before = len(fuzzed.different)
            while len(fuzzed.different) - before < each:
                send()
        growth = f"the server grew by {fuzzed.growth_bytes / 2**20:.1f} MiB, allowed are {GROWTH_BYTES >> 20}"
        told = f"{fuzzed.sent} messages, {len(fuzzed.different)} of them different"
        print(f"{told}; {growth}", *fuzzed.codes.most_common(), sep="\n")
        assert fuzzed.growth_bytes < GROWTH_BYTES, growth


# An update lives through several RPCs, so these share a server; of the others each has its own.
WEIGHTS = tuple(m for m in METHODS if m.containing_service.name == "WeightService")
GROUPS = (*((m,) for m in METHODS if m not in WEIGHTS), WEIGHTS)
NAMES = ["weights" if group == WEIGHTS else group[0].name for group in GROUPS]


def share(group: Sequence[MethodDescriptor], total: int) -> int:
    """How many of `total` messages go to this group."""
    return -(-total * len(group) // len(METHODS))


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS, ids=NAMES)
def test_damaged_messages_end_in_refusals(group: Sequence[MethodDescriptor]) -> None:
    send_many(group, share(group, 10_000))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", GROUPS, ids=NAMES)
def test_a_hundred_thousand_damaged_messages_end_in_refusals(group: Sequence[MethodDescriptor]) -> None:
    send_many(group, share(group, 100_000))
