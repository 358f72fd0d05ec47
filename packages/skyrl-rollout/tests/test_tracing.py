"""Does a collector get a span of every call, with its outcome, and does tracing change nothing else?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from raw_calls import RawCalls, ask, raw_calls, refused
from raw_updates import draft, published
from skyrl_rollout.cli import main
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.server import tracing


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that exporters send, and the instance that sent each."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    async def Export(self, request, context):
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += [(named.get("service.instance.id", ""), span) for span in spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """A collector that speaks OTLP over a socket, and its url."""
    server, kept = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield kept, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextmanager
def traced(url: str) -> Iterator[ReferenceServer]:
    with ReferenceServer("--otel-endpoint", url) as server:
        yield server


async def exercise(calls: RawCalls) -> list[int]:
    """One call of each shape and one refusal; the tokens that were said."""
    answer = await calls.generate(ask(40))
    assert (await refused(calls.stream(ask(3, policy_id="nobody")))).reason == "UNKNOWN_POLICY"
    await published(calls, await calls.epoch(), draft(1))
    return answer.tokens()


async def test_a_span_of_every_call_reaches_the_collector_and_says_how_it_ended() -> None:
    async with collector() as (kept, url):
        with traced(url) as server:
            async with raw_calls(server) as calls:
                await exercise(calls)
            assert await asyncio.to_thread(server.stop) == 0  # the last spans are sent on the way out
        instances, spans = {instance for instance, _ in kept.spans}, [span for _, span in kept.spans]
        assert instances == {server.ready["instance"]}
    names = {span.name.rpartition(".")[2] for span in spans}
    assert {"RolloutService/Generate", "WeightService/UploadChunks", "WeightService/CommitUpdate"} <= names
    codes = {
        attribute.value.int_value
        for span in spans
        if span.name.endswith("/Generate")
        for attribute in span.attributes
        if attribute.key == "rpc.grpc.status_code"
    }
    assert codes == {grpc.StatusCode.OK.value[0], grpc.StatusCode.NOT_FOUND.value[0]}
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in spans)


@pytest.mark.ci  # the exporter tries for some seconds before it gives up
async def test_a_server_says_the_same_with_and_without_a_collector_that_answers() -> None:
    with ReferenceServer() as plain, traced("http://127.0.0.1:1") as lonely:
        async with raw_calls(plain) as one, raw_calls(lonely) as other:
            assert await exercise(one) == await exercise(other)


@pytest.mark.ci  # the exporter tries for some seconds before it gives up
async def test_a_caller_that_leaves_a_traced_stream_frees_the_engine() -> None:
    with traced("http://127.0.0.1:1") as server:
        async with raw_calls(server) as calls:
            stream = calls.stream(ask(4000))
            await stream.read()
            stream.cancel()
            async with asyncio.timeout(5):
                while (await calls.status()).running:
                    await asyncio.sleep(0.02)


def test_the_extra_that_is_missing_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracing, "PARTS", ("no_such_library",))
    code = main(["reference", "--listen", "127.0.0.1:0", "--otel-endpoint", "http://127.0.0.1:4317"])
    assert code != 0
    assert tracing.INSTALL in capsys.readouterr().err


def test_a_variable_asks_for_traces_only_where_the_extra_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    assert tracing.is_wanted(None, environment)
    assert not tracing.is_wanted(None, {})
    monkeypatch.setattr(tracing, "PARTS", ("no_such_library",))
    assert not tracing.is_wanted(None, environment)
