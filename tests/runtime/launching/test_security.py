"""`set_ps_context(enable_ssl=True)`: `init` finds a way on which nothing leaves the host in plain, or is an error."""

from __future__ import annotations

import io
import json
import logging
import os
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from certificates import Authority

import partway as pw
from partway.runtime.launching import interfaces, security
from partway.runtime.launching.certificates import Certificates, Identity
from partway.runtime.launching.job import JOB
from partway.runtime.launching.launchers import Launch, launch
from partway.runtime.launching.security import Wanted, Way, confirm, prepare, want
from partway.strategy import RuntimeStateError

HERE = Launch("torchrun", 0, 2, 0, "127.0.0.1", 29500, one_host=True)
APART = replace(HERE, one_host=False)
LOCAL = Way("lo", "127.0.0.1", "")


@pytest.fixture(autouse=True)
def nothing_wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_MNNVL_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(JOB, "in_plain", set())
    yield
    want(None)
    security.release()


def test_nothing_is_bound_where_nothing_is_wanted() -> None:
    assert prepare(APART, "gloo") is None
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_ranks_on_one_host_bind_to_the_loopback() -> None:
    want(Wanted())
    log, said = logging.getLogger("partway.security"), io.StringIO()
    handler, level = logging.StreamHandler(said), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        way = prepare(HERE, "gloo")
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert way is not None
    assert (way.interface, way.address) == ("lo", "127.0.0.1")
    assert said.getvalue() == "enable_ssl: all ranks are on one host, and bind to lo\n"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    assert os.environ["NCCL_IB_DISABLE"] == "1"
    security.release()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_several_hosts_without_a_way_are_refused_with_the_three_that_there_are() -> None:
    want(Wanted())
    with pytest.raises(RuntimeStateError) as error:
        prepare(APART, "gloo")
    assert "what the ranks send would not be encrypted: they are on several hosts" in str(error.value)
    for way in ("Start all ranks on one host", "secure_interface=, an interface that encrypts", "gloo has TLS"):
        assert way in str(error.value)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_gloo_with_tls_is_given_the_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That it encrypts cannot be tested with PyTorch's wheels for the CPU, whose gloo has no TLS."""
    monkeypatch.setattr(security, "gloo_has_tls", lambda: True)
    authority = Authority(tmp_path)
    server, client = (Identity(side, authority.sign(side)) for side in ("server", "client"))
    want(Wanted())
    with pytest.raises(RuntimeStateError, match="gloo's TLS needs certificates, which the file of config_file"):
        prepare(APART, "gloo")
    certificates = Certificates(server, client, authority.file)
    for more in ({"revoked": authority.revoke()}, {"ciphers": "ECDHE+AESGCM"}):
        want(Wanted(certificates=replace(certificates, **more)))  # type: ignore[arg-type]
        with pytest.raises(
            RuntimeStateError, match="gloo's TLS cannot be told crl_path or cipher_list, which would hold"
        ):
            prepare(APART, "gloo")
    want(Wanted(certificates=certificates))
    with pytest.raises(
        RuntimeStateError, match=r"they are on several hosts, as far as torchrun says, and nccl has no T"
    ):
        prepare(APART, "nccl")
    way = prepare(APART, "gloo")
    assert way is not None
    assert (way.interface, way.leads_to("192.0.2.1")) == ("", True)
    assert os.environ["GLOO_DEVICE_TRANSPORT"] == "TCP_TLS"
    given = {name: os.environ[f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}"] for name in ("PKEY", "CERT", "CA_FILE")}
    ssl.create_default_context(cafile=given["CA_FILE"]).load_cert_chain(given["CERT"], given["PKEY"])
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    security.release()
    assert not [name for name in os.environ if name.startswith("GLOO_")]
    want(None)
    assert prepare(APART, "gloo") is None
    want(Wanted(certificates=certificates))
    with pytest.raises(RuntimeStateError, match="gloo was used in this process before, without TLS, to which it then"):
        prepare(APART, "gloo")


@pytest.mark.parametrize(("wanted", "found", "said"), [
    (Wanted("wg7"), HERE, r"secure_interface is 'wg7', which this host does not have: lo"),
    (Wanted("lo"), HERE, r"'lo' is not WireGuard's: the kernel says nothing of its type; if it encrypts all the same, "
                         r"declare it in the file of config_file_path: \{\"secure_interfaces\": \[\"lo\"\]\}"),
    (Wanted("lo", ("lo",)), replace(HERE, host="192.0.2.1"), r"at 192.0.2.1:29500, which secure_interface 'lo' \(127.0"
                                                             r".0.1\) does not lead to; give MASTER_ADDR an address"),
    (Wanted(), replace(HERE, host="192.0.2.1"), r"they meet at 192.0.2.1:29500, which is another; leave out MASTER_AD"),
])  # fmt: skip
def test_what_cannot_be_is_refused(wanted: Wanted, found: Launch, said: str) -> None:
    want(wanted)
    with pytest.raises(RuntimeStateError, match=said):
        prepare(found, "gloo")


def test_an_interface_that_is_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    want(Wanted("lo", ("lo",)))
    monkeypatch.setattr(interfaces, "is_up", lambda name: False)
    with pytest.raises(RuntimeStateError, match="secure_interface 'lo' is down; bring it up first"):
        prepare(HERE, "gloo")
    monkeypatch.setattr(interfaces, "addresses", dict)
    with pytest.raises(RuntimeStateError, match="secure_interface 'lo' has no IPv4 address; bring it up first"):
        prepare(HERE, "gloo")


def test_wireguard_is_known_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    want(Wanted("lo"))
    monkeypatch.setattr(interfaces, "kind", lambda name: "wireguard")
    way = prepare(HERE, "gloo")
    assert way is not None
    assert way.text == "all ranks bind to lo (WireGuard, verified), here 127.0.0.1"


def test_an_environment_that_contradicts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    want(Wanted())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with pytest.raises(RuntimeStateError, match="enable_ssl=True needs GLOO_SOCKET_IFNAME=lo, and it is 'eth0'; unset"):
        prepare(HERE, "gloo")
    assert "NCCL_NET" not in os.environ


def test_one_host_is_what_the_launcher_says() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}
    scheduler = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "1"}
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_JOB_ID": "1"}
    said = {
        "torchrun": [{**torchrun, "LOCAL_WORLD_SIZE": "2"}, {**torchrun, "LOCAL_WORLD_SIZE": "1"}],
        "by hand": [{**torchrun, "MASTER_ADDR": "localhost"}, torchrun],
        "scheduler": [scheduler, {**scheduler, "MS_SCHED_HOST": "10.0.0.1"}],
        "slurm": [{**slurm, "SLURM_STEP_NUM_NODES": "1"}, {**slurm, "SLURM_STEP_NUM_NODES": "2"}],
    }
    for name, both in said.items():
        found = [launch(environment) for environment in both]
        assert [one is not None and one.one_host for one in found] == [True, False], name


# -- What the ranks say to each other


def test_ranks_that_differ_are_named() -> None:
    store = dist.HashStore()
    confirm(store, 1, 3, None)
    confirm(dist.PrefixStore("x", store), 0, 1, LOCAL)  # alone
    store.set("security/2", json.dumps({"way": {"interface": "wg0", "address": "10.1.1.1"}, "place": "elsewhere"}))
    with pytest.raises(RuntimeStateError, match=r"lo on rank 0, and ranks 1, 2 differ: \{1: 'without enable_ssl', 2"):
        confirm(store, 0, 3, LOCAL)


def test_ranks_that_are_on_another_host_after_all_are_named() -> None:
    store = dist.HashStore()
    store.set("security/1", json.dumps({"way": {"interface": "lo", "address": "127.0.0.1"}, "place": "elsewhere"}))
    with pytest.raises(RuntimeStateError, match=r"not on the host of rank 0, or in another container: rank 1\. Start"):
        confirm(store, 0, 2, LOCAL)
    store.set("security/1", json.dumps({"way": {"interface": "wg0", "address": "192.0.2.9"}, "place": "elsewhere"}))
    way = Way("wg0", "192.0.2.1", "")
    with pytest.raises(RuntimeStateError, match=r"wg0 of rank 0 does not lead to ranks 0, 1\. S"):
        confirm(store, 0, 2, way)


def test_ranks_that_agree_go_on() -> None:
    store = dist.HashStore()
    other = threading.Thread(target=confirm, args=(store, 1, 2, LOCAL))
    other.start()
    confirm(store, 0, 2, LOCAL)
    other.join(20)
    assert not other.is_alive()


def test_a_meeting_that_the_way_does_not_lead_to_is_refused() -> None:
    assert security.meeting("192.0.2.1", None) == "192.0.2.1"
    assert security.meeting("192.0.2.1", LOCAL) == "127.0.0.1"
    with pytest.raises(RuntimeStateError, match=r"rank 0 is at 127\.0\.0\.1, as this rank was told, which wg0"):
        security.meeting("127.0.0.1", Way("wg0", "10.99.99.99", ""))


def test_a_group_that_is_there_cannot_be_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    pw.set_ps_context(enable_ssl=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeStateError, match=r"set_ps_context\(enable_ssl=True\) cannot protect the process gr"):
            pw.init()
        want(None)
        monkeypatch.setenv("PARTWAY_JOB_SECRET", "0123456789abcdef")
        with pytest.raises(RuntimeStateError, match="PARTWAY_JOB_SECRET cannot protect the process group there, wh"):
            pw.init()
    finally:
        dist.destroy_process_group()
