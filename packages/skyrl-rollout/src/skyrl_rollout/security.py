"""What a client shows to a server: a bearer token, and for TLS the roots it trusts and its own certificate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True)
class Credentials:
    """token: sent as `authorization: Bearer ...`. The PEM fields are for grpcs://; root_certificates=None trusts the
    system's roots, certificate_chain with private_key is the client's own identity (mTLS)."""

    token: str | None = None
    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = None

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ValueError("a client certificate needs both certificate_chain and private_key, or neither")
        if self.token is not None and (not self.token.isascii() or self.token != self.token.strip() or not self.token):
            raise ValueError("the bearer token must be a non-empty ASCII string without spaces around it")

    @classmethod
    def from_files(
        cls,
        *,
        token: str | Path | None = None,
        roots: str | Path | None = None,
        certificate: str | Path | None = None,
        private_key: str | Path | None = None,
    ) -> Credentials:
        """Reads each given file; the token file's surrounding whitespace is dropped. Raises OSError naming the file."""
        pem = [None if path is None else Path(path).read_bytes() for path in (roots, certificate, private_key)]
        return cls(None if token is None else Path(token).read_text().strip(), *pem)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def tls(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)

    def __repr__(self) -> str:  # a secret must not reach a log
        return f"Credentials(token={'set' if self.token else None}, tls={self.root_certificates is not None})"


ANONYMOUS = Credentials()
