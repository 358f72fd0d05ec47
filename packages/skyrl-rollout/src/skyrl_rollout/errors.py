"""What can go wrong at the seam: one class per reason, the same on both sides, and its form on the wire.

The canonical gRPC code decides whether to retry, `google.rpc.ErrorInfo.reason` decides logic. An error that this
version does not know becomes a plain `RolloutError` with the code and reason that were sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "rollout.skyrl"


class RolloutError(Exception):
    """A refused or failed call.

    code: the gRPC status code. reason: ErrorInfo.reason, "" where the peer sent none. message: what was wrong, what was
    expected, what to do. details: ErrorInfo.metadata. violations: (field, description) of a BadRequest. retry_after_s:
    RetryInfo, None without one.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str | None = None,
        details: Mapping[str, str] | None = None,
        violations: Sequence[tuple[str, str]] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = type(self).code if code is None else code
        self.reason = type(self).reason if reason is None else reason
        self.details = dict(details or {})
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    @property
    def retried(self) -> bool:
        """Whether the same call may be sent again as it is.

        UNAVAILABLE; CANCELLED, which a server under a burst answers to calls that it never began; and
        RESOURCE_EXHAUSTED where the server said when to come back: without that it means a message that is too large
        or an update that has no room, and waiting cures neither.
        """
        if self.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self.retry_after_s is not None
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class ServerUnreachable(RolloutError):
    """No server answers at the endpoint, or the connection broke."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "UNREACHABLE"


class ServerReplaced(RolloutError):
    """Another process answers at the endpoint: it never saw what the last one was asked, and serves version 0."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "REPLACED"


class ProtocolMismatch(RolloutError):
    """The two sides speak versions of the protocol that do not fit."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_MISMATCH"


class DeadlineExceeded(RolloutError):
    """The outcome is unknown: ask GetUpdate, or attach again with the same request id."""

    code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE"


class Cancelled(RolloutError):
    """The call was dropped; the outcome is unknown."""

    code, reason = grpc.StatusCode.CANCELLED, "CANCELLED"


class InvalidRequest(RolloutError):
    """A field of the request is wrong; sending it again cannot help."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID"


class ModelMismatch(RolloutError):
    """The tensors offered are not those of the served model; `violations` names each of them."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "MODEL_MISMATCH"


class MissingCapability(RolloutError):
    """The server does not offer this; `details["capability"]` is the field of Capabilities that says so."""

    code, reason = grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY"

    @classmethod
    def named(cls, capability: str, what: str) -> MissingCapability:
        return cls(
            f"{what} is not offered by this server (capability {capability}): see GetServerInfo.capabilities",
            details={"capability": capability},
        )


class Unauthenticated(RolloutError):
    """The call carries no credential that this server knows."""

    code, reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class PermissionDenied(RolloutError):
    """The caller is known, and its role may not do this; `details["role_needed"]` is the one that may."""

    code, reason = grpc.StatusCode.PERMISSION_DENIED, "ROLE"


class Fenced(RolloutError):
    """A trainer with a higher epoch owns this server: stop."""

    code, reason = grpc.StatusCode.ABORTED, "FENCED"


class RequestIdReused(RolloutError):
    """The request id belongs to a request with other bytes."""

    code, reason = grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED"


class UpdateIdReused(RolloutError):
    """The update id belongs to an update with another manifest."""

    code, reason = grpc.StatusCode.ALREADY_EXISTS, "UPDATE_ID_REUSED"


class Overloaded(RolloutError):
    """Refused before acceptance because the server is full; retry after `retry_after_s`."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"


class StagingFull(RolloutError):
    """There is no memory to stage the update; serving is unaffected."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL"


class Paused(RolloutError):
    """The server is paused and was told to refuse new work."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "PAUSED"


class Draining(RolloutError):
    """The server is shutting down: use another replica."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "DRAINING"


class Poisoned(RolloutError):
    """The live weights are half replaced: restart the server and publish again."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "POISONED"


class UnknownPolicy(RolloutError):
    """No such policy is loaded; the base policy is never served in its place."""

    code, reason = grpc.StatusCode.NOT_FOUND, "UNKNOWN_POLICY"


class UnknownPause(RolloutError):
    """No pause of this id is held."""

    code, reason = grpc.StatusCode.NOT_FOUND, "UNKNOWN_PAUSE"


class UnknownUpdate(RolloutError):
    """No update of this id is known to this instance of the server."""

    code, reason = grpc.StatusCode.NOT_FOUND, "UNKNOWN_UPDATE"


class WrongState(RolloutError):
    """The call does not fit what the server or the update is doing; the message says what would."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE"


class VersionConflict(RolloutError):
    """Another weight version is committed than the caller assumed; `details["current_version"]` is the real one."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "VERSION_CONFLICT"


class VersionReused(RolloutError):
    """This version of this adapter was committed with other content: publish as a later version."""

    code, reason = grpc.StatusCode.ALREADY_EXISTS, "VERSION_REUSED"


class AdapterFailed(RolloutError):
    """The engine failed while it took an adapter, which is dropped; the base and the other adapters serve on."""

    code, reason = grpc.StatusCode.INTERNAL, "ADAPTER_FAILED"


class CorruptBytes(RolloutError):
    """Bytes that arrived are not those that were promised: send them again."""

    code, reason = grpc.StatusCode.DATA_LOSS, "CORRUPT"


class OffsetHole(RolloutError):
    """A chunk starts beyond the bytes received so far; `details["durable_offset"]` says where to go on."""

    code, reason = grpc.StatusCode.OUT_OF_RANGE, "OFFSET_HOLE"


REASONS: Mapping[str, type[RolloutError]] = {cls.reason: cls for cls in RolloutError.__subclasses__()}

# What a code means where the peer sent no ErrorInfo: a proxy, or gRPC itself.
_BARE_CODES: Mapping[grpc.StatusCode, type[RolloutError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: MissingCapability,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DATA_LOSS: CorruptBytes,
}


# A status travels twice in a call's trailers, and clients of gRPC may refuse more than 8 kB of these: nothing of it is
# known then.
_MESSAGE_BYTES, _VIOLATIONS_BYTES = 1200, 2400
_FIELD_BYTES, _DESCRIPTION_BYTES = 200, 300


def to_status(error: RolloutError) -> status_pb2.Status:
    """The error as google.rpc.Status with ErrorInfo, and RetryInfo / BadRequest where it has them. What is too long for
    the trailers of a call is cut, and says so."""
    status = status_pb2.Status(code=error.code.value[0], message=_cut(error.message, _MESSAGE_BYTES))
    info = error_details_pb2.ErrorInfo(domain=DOMAIN, reason=error.reason, metadata=error.details)
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    if error.violations:
        status.details.add().Pack(_bad_request(error.violations))
    return status


def _bad_request(violations: Sequence[tuple[str, str]]) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for index, (name, description) in enumerate(violations):
        bad.field_violations.add(field=_cut(name, _FIELD_BYTES), description=_cut(description, _DESCRIPTION_BYTES))
        if bad.ByteSize() > _VIOLATIONS_BYTES and (left := len(violations) - index - 1):
            bad.field_violations.add(description=f"and {left} more, which do not fit into the trailers of a call")
            break
    return bad


def _cut(text: str, most: int) -> str:
    data = text.encode()
    return text if len(data) <= most else f"{data[:most].decode(errors='ignore')}... ({len(data) - most} bytes more)"


def from_rpc_error(error: grpc.RpcError, *, endpoint: str = "") -> RolloutError:
    """The typed error behind a failed call; `endpoint` is named where the peer sent no reason of its own."""
    code = error.code()
    status = rpc_status.from_call(error)
    if status is None:
        message = f"{endpoint}: {error.details()}" if endpoint else str(error.details())
        cls = _BARE_CODES.get(code, RolloutError)
        return cls(message, code=code, reason=cls.reason if cls is not RolloutError else code.name)
    return from_status(status)


def from_status(status: status_pb2.Status) -> RolloutError:
    """The typed error in a google.rpc.Status."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    reason, details = code.name, {}
    violations: list[tuple[str, str]] = []
    retry_after_s = None
    for packed in status.details:
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            packed.Unpack(info)
            reason, details = info.reason, dict(info.metadata)
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            packed.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            packed.Unpack(bad)
            violations = [(v.field, v.description) for v in bad.field_violations]
    return REASONS.get(reason, RolloutError)(
        status.message, code=code, reason=reason, details=details, violations=violations, retry_after_s=retry_after_s
    )


_CODES = {code_pb2.Code.Value(code.name): code for code in grpc.StatusCode}
