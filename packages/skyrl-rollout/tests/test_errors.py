"""Errors cross the wire with their class, reason and details."""

from __future__ import annotations

import grpc
import pytest
from skyrl_rollout import errors

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and c.__base__ is errors.RolloutError]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_comes_back_as_what_it_was(cls: type[errors.RolloutError]) -> None:
    sent = cls("why", details={"a": "b"}, violations=[("field", "text")], retry_after_s=1.5)
    got = errors.from_status(errors.to_status(sent))
    assert type(got) is cls
    assert (got.code, got.reason, got.message) == (sent.code, sent.reason, "why")
    assert (got.details, got.violations, got.retry_after_s) == ({"a": "b"}, (("field", "text"),), 1.5)


def test_reasons_are_unique() -> None:
    assert len(errors.REASONS) == len(CLASSES) > 20


def test_a_reason_of_a_later_version_keeps_its_code_and_name() -> None:
    sent = errors.RolloutError("x", code=grpc.StatusCode.ABORTED, reason="FROM_THE_FUTURE")
    got = errors.from_status(errors.to_status(sent))
    assert (type(got), got.code, got.reason) == (errors.RolloutError, grpc.StatusCode.ABORTED, "FROM_THE_FUTURE")


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (errors.Draining("x"), True),
        (errors.Cancelled("x"), True),
        (errors.Overloaded("x", retry_after_s=1.0), True),
        (errors.Overloaded("x"), False),
        (errors.StagingFull("x"), False),
        (errors.Fenced("x"), False),
        (errors.DeadlineExceeded("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_is_retried_where_waiting_can_cure_it(error: errors.RolloutError, retried: bool) -> None:
    assert error.retried is retried
