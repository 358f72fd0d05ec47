"""Who may call what: a bearer token or a client certificate gives a role, and each method needs one."""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from skyrl_rollout.errors import PermissionDenied, RolloutError, Unauthenticated
from skyrl_rollout.security import file_stamp, is_token
from skyrl_rollout.server.answers import refuse
from skyrl_rollout.server.interception import AroundEachCall
from skyrl_rollout.server.options import ServerOptions

logger = logging.getLogger(__name__)

READABLE_BY_OTHERS = 0o007
MAX_TOKEN_BYTES = 4096


class Role(enum.IntEnum):
    """A higher one may do what a lower one may."""

    ROLLOUT = 1
    CONTROL = 2


ROLES = {role.name.lower(): role for role in Role}

# What no line names needs CONTROL.
NEEDED_ROLE: Mapping[str, Role] = {
    "/skyrl_rollout.v1.RolloutService/Generate": Role.ROLLOUT,
    "/skyrl_rollout.v1.RolloutService/Score": Role.ROLLOUT,
    "/skyrl_rollout.v1.RolloutService/AbortGenerations": Role.ROLLOUT,
    "/skyrl_rollout.v1.EngineService/GetServerInfo": Role.ROLLOUT,
    "/skyrl_rollout.v1.EngineService/WatchStatus": Role.ROLLOUT,
    "/skyrl_rollout.v1.EngineService/AcquireControl": Role.CONTROL,
    "/skyrl_rollout.v1.EngineService/Pause": Role.CONTROL,
    "/skyrl_rollout.v1.EngineService/Resume": Role.CONTROL,
    "/skyrl_rollout.v1.EngineService/ResetCache": Role.CONTROL,
    "/skyrl_rollout.v1.EngineService/Sleep": Role.CONTROL,
    "/skyrl_rollout.v1.EngineService/WakeUp": Role.CONTROL,
    "/skyrl_rollout.v1.WeightService/BeginUpdate": Role.CONTROL,
    "/skyrl_rollout.v1.WeightService/UploadChunks": Role.CONTROL,
    "/skyrl_rollout.v1.WeightService/PullUpdate": Role.CONTROL,
    "/skyrl_rollout.v1.WeightService/SealUpdate": Role.CONTROL,
    "/skyrl_rollout.v1.WeightService/CommitUpdate": Role.CONTROL,
    "/skyrl_rollout.v1.WeightService/AbortUpdate": Role.CONTROL,
    "/skyrl_rollout.v1.WeightService/GetUpdate": Role.CONTROL,
    "/grpc.health.v1.Health/Check": Role.ROLLOUT,
    "/grpc.health.v1.Health/List": Role.ROLLOUT,
    "/grpc.health.v1.Health/Watch": Role.ROLLOUT,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.ROLLOUT,
}


class TokenFile:
    """The digest of the one token in a file, read again when the file changes; a file that cannot be used any more
    leaves the last good token valid and is logged."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is missing, that every user may read, or that holds no token."""
        self._path = path
        self._stamp = file_stamp(path)
        self._digest = self._read()

    @property
    def digest(self) -> bytes:
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._digest = self._read()
                logger.info("the token in %s was replaced", self._path)
            except ValueError as error:
                logger.error("%s; the token read last stays valid", error)
        return self._digest

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                mode = self._path.stat().st_mode
                token = file.read(MAX_TOKEN_BYTES + 1).decode("ascii", "replace").strip()
        except OSError as error:
            raise ValueError(f"--token-file {self._path}: {error.strerror}") from None
        if mode & READABLE_BY_OTHERS:
            raise ValueError(f"--token-file {self._path} is open to every user of this machine: chmod 600 it")
        if not is_token(token) or len(token) > MAX_TOKEN_BYTES:
            raise ValueError(f"--token-file {self._path} must hold one line of 1 to {MAX_TOKEN_BYTES} ASCII characters")
        return _digest(token)


class Credentialed:
    """Which role a caller has. Without a token file and without --tls-client-ca everybody has every role."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises ValueError for a token file that cannot be used."""
        self._tokens = [(ROLES[role], TokenFile(path)) for role, path in options.token_files]
        self._names = {name: ROLES[role] for name, role in options.client_roles}
        self._trusts_certificates = options.tls_client_ca is not None
        self.is_open = not self._tokens and not self._trusts_certificates

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens)

    def role_of_token(self, authorization: Sequence[str]) -> Role | None:
        """The role of `authorization: Bearer TOKEN`, None without the header. Raises Unauthenticated for a wrong one.

        Takes the same time for every token of a length.
        """
        if not authorization:
            return None
        scheme, _, token = authorization[0].partition(" ")
        given, role = _digest(token), None
        for owner, file in self._tokens:  # no early end: the time taken says nothing about which token is near
            if hmac.compare_digest(given, file.digest):
                role = max(owner, role or owner)
        if len(authorization) > 1 or scheme.lower() != "bearer" or role is None:
            raise Unauthenticated(
                "the bearer token is not one that this server knows: read it again from where it is kept"
            )
        return role

    def role_of_names(self, names: Iterable[str]) -> Role | None:
        """The role of a client certificate. Without --client-role and without tokens every certificate has CONTROL."""
        if not self._names and not self._tokens:
            return Role.CONTROL
        return max((self._names[name] for name in names if name in self._names), default=None)

    def admit(self, method: str, authorization: Sequence[str], names: Sequence[str]) -> None:
        """names: common names of a verified client certificate. Raises Unauthenticated or PermissionDenied."""
        if self.is_open:
            return
        role = self.role_of_token(authorization) if self._tokens else None
        if role is None and self._trusts_certificates:
            role = self.role_of_names(names)
        if role is None and self._trusts_certificates and not self._tokens:
            raise PermissionDenied(
                f"the certificate of {', '.join(names)} has no role here: add --client-role NAME=ROLE",
                details={"role_needed": _needed(method).name.lower()},
            )
        if role is None:
            raise Unauthenticated("this server needs a credential: send `authorization: Bearer TOKEN`")
        if role < (needed := _needed(method)):
            raise PermissionDenied(
                f"{method} needs the role {needed.name.lower()}, this credential has {role.name.lower()}",
                details={"role_needed": needed.name.lower(), "role": role.name.lower()},
            )


class AuthorizeEachCall(AroundEachCall):
    """Refuses a call before its handler sees it."""

    def __init__(self, credentialed: Credentialed) -> None:
        self._credentialed = credentialed

    @asynccontextmanager
    async def around(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        try:
            self._credentialed.admit(method, _authorization(context), _names(context))
        except RolloutError as error:
            logger.warning("%s from %s refused: %s", method, context.peer(), error.reason)
            await refuse(context, error)
        yield


def _needed(method: str) -> Role:
    return NEEDED_ROLE.get(method, Role.CONTROL)


def _authorization(context: grpc.aio.ServicerContext) -> list[str]:
    metadata = context.invocation_metadata() or ()
    return [v if isinstance(v, str) else v.decode("ascii", "replace") for k, v in metadata if k == "authorization"]


def _names(context: grpc.aio.ServicerContext) -> list[str]:
    return [name.decode("utf-8", "replace") for name in context.auth_context().get("x509_common_name", ())]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
