"""Certificates made for one test: an authority, and what it signs for 127.0.0.1 or for a client's name."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Paths of PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs with a key of its own; `ca` is the file that a peer trusts."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._key, self._name = folder, ec.generate_private_key(ec.SECP256R1()), _name(name)
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / f"{name}.ca.pem"
        signed = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str) -> Pair:
        """A certificate of the common name, also valid for 127.0.0.1 and localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        )
        signed = _builder(_name(name), self._name, key).add_extension(names, critical=False)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.certificate.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
