"""The certificates by which the processes of a job know each other: reads and checks them, and makes TLS contexts.

All faults of certificates are found here, before anything is sent: each process does the TLS handshake with itself in
memory, as it will with others.
"""

from __future__ import annotations

import os
import ssl
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...strategy.basics.extras import install_extra
from ...strategy.basics.files import reason
from ...strategy.errors import RuntimeStateError

if TYPE_CHECKING:
    from cryptography import x509

_PKCS12 = (".p12", ".pfx")


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key: a PKCS#12 file, or a PEM file that holds both.

    name, file   the name of the file in messages, such as "server_cert_path", and the file
    password     of the key; "": it has none
    """

    name: str
    file: Path
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.file})"


@dataclass(frozen=True)
class Certificates:
    """The certificates that the configuration names.

    server, client   the identity of this process when it accepts a connection, and when it opens one
    authority        the certificates that sign those of all processes (PEM)
    revoked          those that are no longer valid (PEM)
    ciphers          OpenSSL's list, such as "ECDHE+AESGCM"; "": OpenSSL's choice, with TLS 1.3
    warn             how long before a certificate expires a warning is issued
    """

    server: Identity
    client: Identity
    authority: Path
    revoked: Path | None = None
    ciphers: str = ""
    warn: timedelta = timedelta(days=90)


@dataclass(frozen=True)
class Contexts:
    """TLS contexts for accepted and for opened connections. Both sides show certificates; names are not compared, since
    the addresses of processes change: any certificate of the authority belongs to the job."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts_of(certificates: Certificates) -> Contexts:
    """The TLS contexts, tried in memory; warns of certificates that expire soon. Raises RuntimeStateError, with the
    name of the file, for one that is missing, unreadable, expired, revoked or not signed by the authority."""
    for identity in dict.fromkeys((certificates.server, certificates.client)):
        _check_dates(identity, _read(identity)[1], certificates.warn)
    contexts = Contexts(
        _context(ssl.PROTOCOL_TLS_SERVER, certificates.server, certificates),
        _context(ssl.PROTOCOL_TLS_CLIENT, certificates.client, certificates),
    )
    _try(contexts, certificates)
    return contexts


def pem_of(identity: Identity) -> tuple[bytes, bytes]:
    """The private key, without a password, and the certificates, as PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key, certificate, others = _read(identity)
    chain = b"".join(one.public_bytes(Encoding.PEM) for one in (certificate, *others))
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), chain


# -- Reading


def _read(identity: Identity) -> tuple[Any, x509.Certificate, list[x509.Certificate]]:
    """The private key, the certificate, and those between it and the authority's."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, pkcs12
    except ImportError:
        raise RuntimeStateError(f"certificates are read by cryptography; run: {install_extra('ssl')}") from None
    data, password = _bytes(identity.name, identity.file, alone=True), identity.password.encode() or None
    try:
        if identity.file.suffix.lower() in _PKCS12:
            key, certificate, others = pkcs12.load_key_and_certificates(data, password)
        else:
            key = load_pem_private_key(data, password)
            certificate, *others = x509.load_pem_x509_certificates(data)
    except TypeError:  # a PEM file
        lacks = "has no password, and one is given" if password else "has a password, and none is given"
        raise RuntimeStateError(f"the private key of {identity} {lacks}") from None
    except ValueError as error:
        if "password" in str(error).lower() or "decrypt" in str(error).lower():
            how = "is wrong" if password else "is not given"
            raise RuntimeStateError(f"the password of {identity} {how}") from None
        kind = "a PKCS#12 file" if identity.file.suffix.lower() in _PKCS12 else "a PEM file"
        raise RuntimeStateError(f"{identity} is not {kind} of a private key and its certificate") from None
    if key is None or certificate is None:
        raise RuntimeStateError(f"{identity} has no {'private key' if key is None else 'certificate'}")
    return key, certificate, list(others)


def _bytes(name: str, file: Path, alone: bool = False) -> bytes:
    """The content of a file; `alone`: nobody else may read it, except root's group if the file is root's: so Kubernetes
    gives a Secret to a process of another user."""
    try:
        status, data = file.stat(), file.read_bytes()
    except (OSError, ValueError) as error:  # a name with NUL
        raise RuntimeStateError(f"{name} names {file}, which cannot be read: {reason(error)}") from None
    others = 0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
    if alone and status.st_mode & others:
        raise RuntimeStateError(f"{name} names {file}, which other users may read or write; run: chmod 600 {file}")
    return data


def _check_dates(identity: Identity, certificate: x509.Certificate, warn: timedelta) -> None:
    now, start, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise RuntimeStateError(f"the certificate of {identity} has expired, on {end:%Y-%m-%d}; make a new one")
    if now < start:
        raise RuntimeStateError(
            f"the certificate of {identity} is not valid before {start:%Y-%m-%d %H:%M} UTC; is the clock right?"
        )
    if now > end - warn:
        left = f"in {(end - now).days} days, on {end:%Y-%m-%d}"
        warnings.warn(f"the certificate of {identity} expires {left}", stacklevel=2)


# -- Contexts


def _context(protocol: Any, identity: Identity, certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    key, chain = pem_of(identity)
    with _for_openssl(key + chain) as file:
        try:
            context.load_cert_chain(file)
        except ssl.SSLError:
            raise RuntimeStateError(f"the private key of {identity} is not that of its certificate") from None
    _load("ca_cert_path", certificates.authority, context.load_verify_locations)
    if certificates.revoked is not None:
        _load("crl_path", certificates.revoked, context.load_verify_locations)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if certificates.ciphers:
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # the ciphers of TLS 1.3 cannot be chosen
        try:
            context.set_ciphers(certificates.ciphers)
        except (ssl.SSLError, ValueError):
            raise RuntimeStateError(
                f"cipher_list is {certificates.ciphers!r}, of which this OpenSSL knows none; `openssl ciphers -tls1_2` "
                "prints those that it knows"
            ) from None
    return context


def _load(name: str, file: Path, load: Callable[..., None]) -> None:
    data = _bytes(name, file)
    try:
        load(cadata=data.decode("ascii")) if name != "crl_path" else load(cafile=str(file))
    except (ssl.SSLError, ValueError):
        what = "certificates" if name != "crl_path" else "a list of revoked certificates"
        raise RuntimeStateError(f"{name} names {file}, which is no PEM file of {what}") from None


@contextmanager
def _for_openssl(pem: bytes) -> Iterator[str]:
    """The path of a file with `pem` for the standard library, which takes no bytes: in memory if the system supports
    that, else readable by this user alone."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("partway")
        try:
            os.write(number, pem)
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)
        return
    with tempfile.NamedTemporaryFile() as file:  # nobody else may read it
        file.write(pem)
        file.flush()
        yield file.name


def _try(contexts: Contexts, certificates: Certificates) -> None:
    """Do the TLS handshake with oneself. Raises RuntimeStateError with the complaint of either side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = {
        certificates.server: contexts.client.wrap_bio(to_client, to_server),
        certificates.client: contexts.server.wrap_bio(to_server, to_client, server_side=True),
    }  # each with the identity whose certificate it checks
    left = list(sides)
    for _ in range(10):
        for of in list(left):
            try:
                sides[of].do_handshake()
                left.remove(of)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise RuntimeStateError(_refused(of, error.verify_message, certificates)) from None
            except ssl.SSLError as error:
                raise RuntimeStateError(f"TLS with {certificates.server} fails: {error.reason or error}") from None
        if not left:
            return
    raise AssertionError("a handshake in memory does not end")


def _refused(identity: Identity, why: str, certificates: Certificates) -> str:
    if "revoked" in why:
        return f"the certificate of {identity} was revoked, by crl_path ({certificates.revoked}); make a new one"
    if "issuer" in why or "self" in why or "signature" in why:
        return f"the certificate of {identity} is not signed by ca_cert_path ({certificates.authority}): {why}"
    return f"the certificate of {identity} is not valid: {why}"
