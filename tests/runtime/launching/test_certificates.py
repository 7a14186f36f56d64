"""What is wrong with a job's certificates is found before anything is sent."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from certificates import Authority

from partway.runtime.launching.certificates import Certificates, Identity, contexts_of, pem_of
from partway.strategy import RuntimeStateError

DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def good(authority: Authority) -> Certificates:
    return Certificates(
        Identity("server_cert_path", authority.sign("server")), Identity("client_cert_path", authority.sign("client")),
        authority.file,
    )  # fmt: skip


def server(good: Certificates, file: Path, password: str = "") -> Certificates:
    return replace(good, server=Identity("server_cert_path", file, password))


def client(good: Certificates, file: Path) -> Certificates:
    return replace(good, client=Identity("client_cert_path", file))


def refused(certificates: Certificates, text: str) -> None:
    with pytest.raises(RuntimeStateError, match=text):
        contexts_of(certificates)


def test_certificates_of_one_authority_are_taken(good: Certificates, authority: Authority) -> None:
    contexts = contexts_of(good)
    assert contexts.server.get_ca_certs() == contexts.client.get_ca_certs() != []
    contexts_of(server(good, authority.sign("other", kind="p12", password="secret word"), "secret word"))
    contexts_of(server(good, authority.sign("third", password="secret word"), "secret word"))
    contexts_of(replace(good, ciphers="ECDHE+AESGCM"))
    contexts_of(replace(good, revoked=authority.revoke(authority.sign("lost"))))


def test_what_has_expired_or_is_not_valid_yet_is_named(good: Certificates, authority: Authority) -> None:
    old, young = authority.sign("old", -9 * DAY, -DAY), authority.sign("young", DAY, 9 * DAY)
    refused(
        server(good, old), r"^the certificate of server_cert_path \(.*old.pem\) has expired, on 20\d\d-\d\d-\d\d; make"
    )
    refused(client(good, old), r"^the certificate of client_cert_path \(.*old.pem\) has expired, on")
    refused(
        client(good, young), r"^the certificate of client_cert_path \(.*\) is not valid before .* UTC; is the clock"
    )
    with pytest.warns(
        UserWarning, match=r"^the certificate of client_cert_path \(.*soon.pem\) expires in 29 days, on 2"
    ):
        contexts_of(client(good, authority.sign("soon", -DAY, 30 * DAY)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contexts_of(replace(client(good, authority.sign("soon", -DAY, 30 * DAY)), warn=20 * DAY))


def test_a_certificate_of_another_authority_is_foreign(good: Certificates, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    foreign = other.sign("foreign")
    refused(
        server(good, foreign), r"^the certificate of server_cert_path \(.*foreign.pem\) is not signed by ca_cert_path"
    )
    refused(
        client(good, foreign), r"^the certificate of client_cert_path \(.*\) is not signed by ca_cert_path \(.*auth"
    )


def test_a_certificate_that_was_revoked_is_named(good: Certificates, authority: Authority) -> None:
    revoked = authority.revoke(good.client.file)
    refused(
        replace(good, revoked=revoked), r"^the certificate of client_cert_path \(.*client.pem\) was revoked, by crl_pa"
    )


def test_a_wrong_password_is_not_told(good: Certificates, authority: Authority) -> None:
    locked = {kind: authority.sign("locked", kind=kind, password="the right word") for kind in ("pem", "p12")}
    for kind in ("pem", "p12"):
        wrong = server(good, locked[kind], "the wrong word")
        refused(wrong, r"^the password of server_cert_path \(\S*\) is wrong$")
        assert "the wrong word" not in repr(wrong)
    refused(server(good, locked["p12"]), r"^the password of server_cert_path \(.*locked.p12\) is not given$")
    refused(
        server(good, locked["pem"]), r"^the private key of server_cert_path \(.*\) has a password, and none is given$"
    )
    refused(server(good, good.server.file, "x"), r"^the private key of server_.* has no password, and one is given$")


def test_files_that_are_not_what_they_should_be_are_named(
    good: Certificates, authority: Authority, tmp_path: Path
) -> None:
    refused(
        server(good, tmp_path / "none.pem"), r"^server_cert_path names .*none.pem, which cannot be read: No such file"
    )
    refused(
        replace(good, authority=tmp_path / "none"), r"^ca_cert_path names .*none, which cannot be read: No such file"
    )
    refused(replace(good, revoked=tmp_path / "none"), r"^crl_path names .*none, which cannot be read: No such file")
    for name, what in (("a.pem", "a PEM file"), ("a.p12", "a PKCS#12 file")):
        file = tmp_path / name
        file.touch(mode=0o600)
        file.write_text("nothing")
        refused(server(good, file), rf"^server_cert_path \(.*\) is not {what} of a private key and its certificate$")
    refused(
        replace(good, authority=tmp_path / "a.pem"), r"^ca_cert_path names .*, which is no PEM file of certificates$"
    )
    refused(
        replace(good, revoked=tmp_path / "a.pem"), r"^crl_path names .*a.pem, which is no PEM file of a list of revoked"
    )
    refused(replace(good, ciphers="NONE-OF-THEM"), r"^cipher_list is 'NONE-OF-THEM', of which this OpenSSL knows none")
    good.client.file.chmod(0o644)
    refused(good, r"^client_cert_path names .*, which other users may read or write; run: chmod 600 \S*client.pem$")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root are made by root")
def test_a_key_of_roots_may_be_read_by_its_group_as_kubernetes_gives_it(
    good: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    good.client.file.chmod(0o640)
    assert b"PRIVATE KEY" in pem_of(good.client)[0]
    for mode in (0o660, 0o644):
        good.client.file.chmod(mode)
        refused(good, r"^client_cert_path names .*, which other users may read or write")


def test_a_key_of_another_certificate_is_named(good: Certificates, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.pem"
    mixed.touch(mode=0o600)
    mixed.write_bytes(pem_of(good.server)[0] + pem_of(good.client)[1])
    refused(server(good, mixed), r"^the private key of server_cert_path \(.*\) is not that of its certificate$")
