"""What a client shows to a server: a bearer token, and for TLS the roots it trusts and its own certificate."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import grpc

# Read here and nowhere else: a trainer, its workers and a shell tool show what these name.
ENVIRONMENT = {
    "token": "SKYRL_ROLLOUT_TOKEN_FILE",
    "roots": "SKYRL_ROLLOUT_CA_FILE",
    "certificate": "SKYRL_ROLLOUT_CERT_FILE",
    "private_key": "SKYRL_ROLLOUT_KEY_FILE",
}


@dataclass(frozen=True)
class CredentialFiles:
    """The files that credentials were read from; the contents may be replaced while a client runs."""

    token: Path | None = None
    roots: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes when the content of a TLS file does."""
        return tuple(file_stamp(path) for path in (self.roots, self.certificate, self.private_key) if path is not None)

    def check(self) -> None:
        """Raises ValueError unless the TLS files hold certificates, and a key that belongs to the client's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.roots is not None:
                context.load_verify_locations(self.roots)
            if self.certificate is not None and self.private_key is not None:
                context.load_cert_chain(self.certificate, self.private_key)
        except ssl.SSLError as error:
            names = ", ".join(str(p) for p in (self.roots, self.certificate, self.private_key) if p is not None)
            raise ValueError(f"the TLS files ({names}) cannot be used: {error.strerror}") from None


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """(inode, nanoseconds of the last change of content or mode, size), or None while there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns, found.st_size


@dataclass(frozen=True)
class Credentials:
    """token: sent as `authorization: Bearer ...`. The PEM fields are for grpcs://; root_certificates=None trusts the
    system's roots, certificate_chain with private_key is the client's own identity (mTLS). files: where they came
    from; the token is read again for every call, the PEM files for every new connection."""

    token: str | None = None
    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = None
    files: CredentialFiles | None = None
    _read_last: list[str] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ValueError("a client certificate needs both certificate_chain and private_key, or neither")
        if self.token is not None and not is_token(self.token):
            raise ValueError("the bearer token must be a non-empty ASCII string without spaces around it, on one line")

    @classmethod
    def from_files(
        cls,
        *,
        token: str | Path | None = None,
        roots: str | Path | None = None,
        certificate: str | Path | None = None,
        private_key: str | Path | None = None,
    ) -> Credentials:
        """Reads each given file; the token file's surrounding whitespace is dropped. Raises OSError naming the file,
        ValueError for one that does not hold what it should."""
        files = CredentialFiles(*(None if p is None else Path(p) for p in (token, roots, certificate, private_key)))
        return cls._read(files)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Credentials:
        """What $SKYRL_ROLLOUT_TOKEN_FILE, _CA_FILE, _CERT_FILE and _KEY_FILE name; anonymous without them.

        Raises ValueError naming the variable of a file that cannot be read.
        """
        environment = os.environ if environment is None else environment
        paths = {name: environment[variable] for name, variable in ENVIRONMENT.items() if environment.get(variable)}
        try:
            return cls.from_files(**paths) if paths else ANONYMOUS
        except OSError as error:
            named = next((f"{ENVIRONMENT[n]}={p}" for n, p in paths.items() if p == error.filename), str(paths))
            raise ValueError(f"{named}: {error.strerror}: name a file that this process can read") from None

    @classmethod
    def _read(cls, files: CredentialFiles) -> Credentials:
        files.check()
        roots, certificate, key = (
            None if path is None else path.read_bytes() for path in (files.roots, files.certificate, files.private_key)
        )
        return cls(None if files.token is None else files.token.read_text().strip(), roots, certificate, key, files)

    def read_again(self) -> Credentials:
        """The same files as they are now; itself where it came from none. Raises OSError, ValueError."""
        return self if self.files is None else self._read(self.files)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call: the token as its file has it now, or as last read while that has none."""
        token = self.token
        if self.files is not None and self.files.token is not None:
            try:
                now = self.files.token.read_text().strip()
            except OSError:
                now = ""
            if is_token(now):
                self._read_last[:] = [now]
            token = self._read_last[0] if self._read_last else token
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def tls(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)

    def __repr__(self) -> str:  # a secret must not reach a log
        return f"Credentials(token={'set' if self.token else None}, tls={self.root_certificates is not None})"


def is_token(token: str) -> bool:
    """Whether it can be sent as a bearer token."""
    return bool(token) and token.isascii() and token.isprintable() and token == token.strip()


ANONYMOUS = Credentials()
assert {f.name for f in fields(CredentialFiles)} == set(ENVIRONMENT)
