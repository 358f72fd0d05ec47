"""The server's own certificate and the roots of its clients, read again when their files change: no restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from skyrl_rollout.security import file_stamp
from skyrl_rollout.server.options import ServerOptions

logger = logging.getLogger(__name__)


class ServerCertificates:
    """The files of --tls-certificate, --tls-key and --tls-client-ca. New connections get what the files hold then; a
    set that does not fit together yet is not taken."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Raises ValueError naming the flag of a file that cannot be used."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._stamp = self._files_now()
        self._check()

    @classmethod
    def of(cls, options: ServerOptions) -> ServerCertificates | None:
        """None without --tls-certificate."""
        if options.tls_certificate is None or options.tls_key is None:
            return None
        return cls(options.tls_certificate, options.tls_key, options.tls_client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`; with a client CA a caller without a certificate is not let in."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._changed, require_client_authentication=self._client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """The same for Python's own TLS. Raises ValueError."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate, self._key)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # ssl.SSLError is one
            names = ", ".join(str(path) for path in (self._certificate, self._key, self._client_ca) if path)
            raise ValueError(f"the TLS files ({names}) cannot be used: {error.strerror or error}") from None
        return context

    def _check(self) -> None:
        for flag, path in (("certificate", self._certificate), ("key", self._key), ("client-ca", self._client_ca)):
            if path is not None and not path.is_file():
                raise ValueError(f"--tls-{flag} {path}: there is no such file")
        self.context()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self._key.read_bytes(), self._certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration(
            [pair], root_certificates=None if self._client_ca is None else self._client_ca.read_bytes()
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, in a thread of its own, before every handshake."""
        now = self._files_now()
        if now == self._stamp:
            return None
        try:
            self._check()
            configuration = self._configuration()
        except (OSError, ValueError) as error:
            logger.warning("the new TLS files are not taken yet: %s", error)
            return None
        self._stamp = now
        logger.info("new TLS files: new connections get the certificate in %s", self._certificate)
        return configuration

    def _files_now(self) -> tuple[object, ...]:
        return tuple(file_stamp(path) for path in (self._certificate, self._key, self._client_ca) if path is not None)
