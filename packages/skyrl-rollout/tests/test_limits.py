"""Is every bound of docs/limits.md held over the wire, named in the refusal, and written down?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from raw_calls import RawCalls, ask, refused
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.server.limits import BOUNDS, Bound, table
from skyrl_rollout.v1 import control_pb2, generation_pb2, weights_pb2

DOCS = Path(__file__).parents[1] / "docs"
SERVICES = {
    name: service
    for module in (control_pb2, generation_pb2, weights_pb2)
    for name, service in module.DESCRIPTOR.services_by_name.items()
}
PLACES = [(call, bound) for call, bounds in BOUNDS.items() for bound in bounds]


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer() as process:
        yield process


def filled(call: str, bound: Bound, held: int) -> Message:
    """A request of this call that holds `held` in the bounded field and nothing else."""
    service, method = call.split("/")
    request = GetMessageClass(SERVICES[service].methods_by_name[method].input_type)()
    *path, last = bound.field.split(".")
    owner = request
    for name in path:
        owner = getattr(owner, name)
    value, kind = getattr(owner, last), owner.DESCRIPTOR.fields_by_name[last]
    if isinstance(value, Duration):
        value.FromSeconds(held)
    elif isinstance(value, str):
        setattr(owner, last, "x" * held)
    elif kind.message_type is None:
        value.extend(["x" if kind.type == kind.TYPE_STRING else 1] * held)
    elif not kind.message_type.GetOptions().map_entry:
        for _ in range(held):
            value.add()
    elif kind.message_type.fields_by_name["value"].message_type is None:
        value.update(dict.fromkeys(range(held), 0.5))
    else:
        for i in range(held):
            value[str(i)].number_value = 0.5
    return request


@pytest.mark.parametrize(("call", "bound"), PLACES, ids=[f"{call}.{bound.field}" for call, bound in PLACES])
async def test_a_field_beyond_its_bound_is_refused_by_name(calls: RawCalls, call: str, bound: Bound) -> None:
    service, method = call.split("/")
    stub = {"RolloutService": calls.rollout, "EngineService": calls.engine, "WeightService": calls.weights}[service]
    error = await refused(getattr(stub, method)(filled(call, bound, bound.most + 1), timeout=10))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (bound.field, f"has {bound.most + 1:g} {bound.unit}, at most {bound.most} are taken") in error.violations
    assert len((await calls.generate(ask(2))).tokens()) == 2


@pytest.mark.parametrize(("call", "bound"), PLACES, ids=[f"{call}.{bound.field}" for call, bound in PLACES])
def test_a_field_at_its_bound_is_not(call: str, bound: Bound) -> None:
    assert bound.excess(filled(call, bound, bound.most)) is None


def test_the_documented_table_is_that_of_the_code() -> None:
    assert table() in (DOCS / "limits.md").read_text()
