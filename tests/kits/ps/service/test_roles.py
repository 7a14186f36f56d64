"""The processes of a job with a parameter server, by their variables: what is missing or wrong is an error at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import partway as pw
from partway.ps.service import cluster, roles
from partway.ps.service.cluster import Site
from partway.ps.service.settings import ServerSettings, want
from partway.runtime.launching import launchers, security
from partway.runtime.launching.certificates import Certificates, Identity
from partway.strategy import RuntimeStateError

WORKER = {
    "MS_ROLE": "MS_WORKER", "MS_SERVER_NUM": "2", "MS_WORKER_NUM": "3", "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "6667",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*roles.VARIABLES, "MS_NODE_ID", "PARTWAY_JOB_SECRET", roles.FOLDER):
        monkeypatch.delenv(name, raising=False)
    want(ServerSettings())
    yield
    want(None)
    security.want(None)


def given(monkeypatch: pytest.MonkeyPatch, **variables: str | None) -> None:
    for name, value in {**WORKER, **variables}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_a_worker_knows_where_and_how_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given(monkeypatch, MS_TOPO_TIMEOUT="60", MS_NODE_TIMEOUT="5")
    monkeypatch.setenv(roles.FOLDER, str(tmp_path))
    found = roles._variables()
    assert found is not None
    role, site, plan = found
    assert (role, site.address, site.folder) == ("MS_WORKER", "127.0.0.1:6667", tmp_path)
    assert (plan.workers, plan.servers, plan.patience, plan.silence) == (3, 2, 60, 5)


def test_without_variables_it_is_alone() -> None:
    assert roles._variables() is None


@pytest.mark.parametrize("name", [name for name in roles.VARIABLES if name not in ("MS_ROLE", "MS_SERVER_NUM")])
def test_a_variable_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **{name: None})
    with pytest.raises(
        RuntimeStateError, match=rf"^MS_ROLE=MS_WORKER is a process of a parameter server, and .* no {name};"
    ):
        roles._variables()


def test_variables_without_a_role_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, MS_ROLE=None)
    with pytest.raises(
        RuntimeStateError, match=r"^MS_WORKER_NUM=3 is set, and MS_ROLE is not: set it to MS_SCHED, MS_PSER"
    ):
        roles._variables()


def test_another_role_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, MS_ROLE="MS_SERVER")
    text = r"^MS_ROLE is 'MS_SERVER'; with a parameter server it is MS_SCHED, MS_PSERVER, MS_WORKER$"
    with pytest.raises(RuntimeStateError, match=text):
        roles._variables()


@pytest.mark.parametrize(("name", "value", "text"), [
    ("MS_SERVER_NUM", "0", "MS_SERVER_NUM is 0, and set_ps_context(enable_ps=True) asks for servers: start 1 or more"),
    ("MS_SERVER_NUM", "two", "MS_SERVER_NUM is 'two'; it must be an int of 1 or more"),
    ("MS_WORKER_NUM", "0", "MS_WORKER_NUM is '0'; it must be an int of 1 or more"),
    ("MS_SCHED_PORT", "-1", "MS_SCHED_PORT is '-1'; it must be an int of 1 or more"),
    ("MS_NODE_TIMEOUT", "soon", "MS_NODE_TIMEOUT is 'soon'; it is a number of seconds, such as 30"),
])  # fmt: skip
def test_a_wrong_number_is_an_error(name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **{name: value})
    with pytest.raises(RuntimeStateError) as caught:
        roles._variables()
    assert str(caught.value).startswith(text)


def test_an_address_of_ipv6_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, MS_SCHED_HOST="[::1]")
    text = r"^MS_SCHED_HOST is \[::1\]; a parameter server needs an IPv4 address, or a name of one$"
    with pytest.raises(RuntimeStateError, match=text):
        roles._variables()


def test_init_says_that_servers_have_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    want(None)
    given(monkeypatch)
    text = r"^MS_SERVER_NUM=2 asks for a parameter server; call set_ps_context\(enable_ps=True\) befo"
    with pytest.raises(RuntimeStateError, match=text):
        pw.init()


def test_workers_of_a_parameter_server_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    assert not launchers.started()
    assert launchers.launch() is None
    monkeypatch.setenv("MS_SERVER_NUM", "0")
    assert launchers.started()


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cluster.importlib.util.find_spec
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None if name == "ray" else plain(name))
    with pytest.raises(
        RuntimeStateError, match=r"^the parameter server needs ray, .*: pip install '\.\[ps\]' in Partway's checkout$"
    ):
        roles.join()


def test_several_hosts_need_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARTWAY_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        RuntimeStateError, match=r"^the parameter server listens at 192\.0\.2\.7, and whoever reaches it could"
    ):
        roles.protect(Site("192.0.2.7", 6667, None))


def test_a_token_follows_from_the_secret_or_is_a_file_of_the_user(tmp_path: Path) -> None:
    one, other = cluster.token_of(b"a" * 16, "192.0.2.7", tmp_path), cluster.token_of(b"b" * 16, "192.0.2.7", tmp_path)
    assert one != other
    assert one is not None
    assert len(one) == 64
    assert list(tmp_path.iterdir()) == []
    kept = cluster.token_of(None, "127.0.0.1", tmp_path)
    assert kept == cluster.token_of(None, "localhost", tmp_path)
    assert (tmp_path / "ps-token").stat().st_mode & 0o777 == 0o600


def test_tls_over_a_network_needs_certificates(tmp_path: Path) -> None:
    security.want(security.Wanted())
    assert roles._tls(Site("127.0.0.1", 6667, None)) == {}
    with pytest.raises(
        RuntimeStateError, match=r"^enable_ssl=True, and the parameter server at 192\.0\.2\.7:6667 is reached "
    ):
        roles._tls(Site("192.0.2.7", 6667, None))


def test_what_rays_tls_cannot_be_told_is_an_error(tmp_path: Path) -> None:
    own = Identity("server_cert_path", tmp_path / "server.pem", "")
    named = Certificates(own, own, tmp_path / "ca.pem", tmp_path / "crl.pem")
    security.want(security.Wanted(certificates=named))
    with pytest.raises(
        RuntimeStateError, match=r"^Ray's TLS cannot be told crl_path or cipher_list, which would be ignored;"
    ):
        roles._tls(Site("127.0.0.1", 6667, None))


def test_a_certificate_has_to_name_the_address_of_its_host(tmp_path: Path) -> None:
    certificates = pytest.importorskip("certificates")
    authority = certificates.Authority(tmp_path)
    local = Site("127.0.0.1", 6667, None)
    roles.check_address(Identity("server_cert_path", authority.sign("here", address="127.0.0.1"), ""), local)
    for file, told in (
        (authority.sign("none"), "no address"),
        (authority.sign("other", address="192.0.2.9"), "192.0.2.9"),
    ):
        with pytest.raises(RuntimeStateError) as caught:
            roles.check_address(Identity("server_cert_path", file, ""), local)
        assert f"is for {told}, and Ray's TLS compares addresses: make one with subjectAltName=IP:127.0.0.1" in str(
            caught.value
        )


def test_the_folder_of_partway_ps_is_given_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    want(ServerSettings(shard_folder=tmp_path / "mine"))
    given(monkeypatch)
    monkeypatch.setenv(roles.FOLDER, str(tmp_path / "its"))
    with pytest.raises(RuntimeStateError) as caught:
        roles._variables()
    assert str(caught.value) == (
        f"`partway ps` keeps the parameters in {tmp_path}/its, and shard_folder is {tmp_path}/mine; give --shards "
        f"{tmp_path}/mine instead"
    )
