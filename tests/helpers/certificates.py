"""A certificate authority for tests, which writes its certificates to files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """A certificate authority with its files in `folder`, under its name."""

    folder: Path
    name: str = "authority"

    def __post_init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(self.name, self.name, key, timedelta(days=-1), timedelta(days=1000))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        object.__setattr__(self, "_key", key)
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def sign(
        self, name: str, start: timedelta = timedelta(days=-1), end: timedelta = timedelta(days=1000),
        kind: str = "pem", password: str = "", address: str = "",
    ) -> Path:  # fmt: skip
        """A file with a new key and its certificate, valid from `start` to `end`, relative to now. `address`: the
        address of the host in it."""
        key: Any = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(name, self.name, key, start, end)
        if address:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())  # type: ignore[attr-defined]
        secret = BestAvailableEncryption(password.encode()) if password else NoEncryption()
        file = self.folder / f"{name}.{kind}"
        file.touch(mode=0o600)
        if kind == "pem":
            private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret)
            file.write_bytes(private + certificate.public_bytes(Encoding.PEM))
        else:
            file.write_bytes(pkcs12.serialize_key_and_certificates(name.encode(), key, certificate, None, secret))
        return file

    def revoke(self, *files: Path) -> Path:
        """A file that revokes the certificates in `files`."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(_name(self.name))
        builder = builder.last_update(now - timedelta(days=1)).next_update(now + timedelta(days=100))
        for file in files:
            number = x509.load_pem_x509_certificate(file.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now)
            builder = builder.add_revoked_certificate(entry.build())
        revoked = builder.sign(self._key, hashes.SHA256())  # type: ignore[attr-defined]
        file = self.folder / f"{self.name}.crl"
        file.write_bytes(revoked.public_bytes(Encoding.PEM))
        return file


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(name: str, issuer: str, key: Any, start: timedelta, end: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name)).issuer_name(_name(issuer)).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now + start).not_valid_after(now + end)
    )  # fmt: skip
