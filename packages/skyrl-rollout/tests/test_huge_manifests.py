"""Manifests and shapes of any size are refused at once, with a reason that reaches the caller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from raw_calls import RawCalls, ask, refused
from raw_updates import begin, draft, version
from skyrl_rollout import wire
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.weights.manifest import TensorLayout, place


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer() as process:
        yield process


async def test_a_tensor_named_twice_among_many_is_found_at_once(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    many = [replace(d.manifest.tensors[0], layout=TensorLayout(f"t{i % 49_999}", "f32", (0,))) for i in range(50_000)]
    error = await refused(begin(calls, epoch, replace(d, manifest=replace(d.manifest, tensors=tuple(many)))))
    assert (error.code, "manifest.tensors has t0 twice" in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_model_that_differs_in_thousands_of_tensors_is_told_so(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    many = place([TensorLayout(f"model.layers.{i}.self_attn.q_proj.weight", "f32", (1,)) for i in range(5000)])
    error = await refused(begin(calls, epoch, replace(d, manifest=replace(d.manifest, tensors=tuple(many)))))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MODEL_MISMATCH")
    assert "5003 tensors do not fit" in error.message
    *named, (_, rest) = error.violations
    assert named[0][0] == "manifest.tensors[model.layers.0.self_attn.q_proj.weight]" and len(named) > 5
    assert rest == f"and {5003 - len(named)} more, which do not fit into the trailers of a call"


async def test_long_names_are_cut_where_they_are_told(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    named = replace(d.manifest.tensors[0], layout=TensorLayout("n" * 1_000_000, "f32", (1,)))
    error = await refused(begin(calls, epoch, replace(d, manifest=replace(d.manifest, tensors=(named,)))))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MODEL_MISMATCH")
    assert "bytes more)" in error.message and "4 tensors do not fit" in error.message


async def test_a_shape_of_a_million_dimensions_is_refused_before_it_is_multiplied(calls: RawCalls, epoch: int) -> None:
    d = draft(await version(calls) + 1)
    manifest = wire.manifest_to_pb(d.manifest)
    manifest.tensors[0].shape.extend([2**62] * 200_000)
    error = await refused(begin(calls, epoch, d, manifest=manifest))
    assert (error.code, "dimensions" in error.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert len((await calls.generate(ask(3))).tokens()) == 3
