"""`partway doctor` under a launcher: whether the ranks reach each other, and which do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import namespaces
import pytest
import torch.distributed as dist
from scripts import free_port

from partway.doctor.reach import Health, Met, RankCard, ReachReport, check, join, problems
from partway.runtime.launching.launchers import Launch
from partway.strategy import RuntimeStateError

CARDS = {
    rank: RankCard(
        rank=rank, host=host, place=host, process=100 + rank, address=f"10.0.0.{rank + 1}", interface="eth0",
        port=40000 + rank, towards=f"10.0.0.{rank + 1}", by="eth0", token="", versions="partway 1, torch 2",
    )
    for rank, host in enumerate("ab")
}  # fmt: skip
FINE = {0: ReachReport({}), 1: ReachReport({}, ahead=-0.25, exact=0.001)}


def texts(cards: Mapping[int, RankCard], reports: Mapping[int, ReachReport]) -> list[str]:
    return [f"{problem.rank}: {problem.text}" for problem in problems(cards, reports)]


# -- What is wrong, by what the ranks found ----------------------------------------------------------------------------


def test_nothing_is_wrong_where_all_reach_each_other() -> None:
    assert texts(CARDS, FINE) == []
    health = Health(CARDS, FINE, ())
    assert health.well == "2 ranks on 2 hosts reach each other"
    assert health.table().splitlines() == [
        "rank  host  process  listens at             clock, to rank 0   runs",
        "0     a     100      10.0.0.1:40000 (eth0)                     partway 1, torch 2",
        "1     b     101      10.0.0.2:40001 (eth0)  +250.00 ms ± 1.00  partway 1, torch 2",
    ]


def test_a_pair_that_does_not_connect_is_named() -> None:
    assert texts(CARDS, {**FINE, 1: ReachReport({0: "no answer in 5 s"})}) == [
        "1: rank 1 (host b, 10.0.0.2) cannot reach rank 0 (host a, 10.0.0.1) at port 40000: no answer in 5 s; check "
        "GLOO_SOCKET_IFNAME on both hosts, and what stands between them (a firewall)"
    ]
    many = {rank: replace(CARDS[0], rank=rank) for rank in range(20)}
    found = texts(many, {rank: ReachReport({(rank + 1) % 20: "connection refused"}) for rank in many})
    assert len(found) == 13
    assert found[-1] == "0: and 8 more pairs of ranks"


def test_versions_and_clocks_that_differ_are_named() -> None:
    cards = {**CARDS, 1: replace(CARDS[1], versions="partway 2, torch 2")}
    assert texts(cards, {**FINE, 1: ReachReport({}, ahead=-7.5, exact=0.001)}) == [
        "1: rank 1 (host b, 10.0.0.2) runs partway 2, torch 2, and rank 0 partway 1, torch 2; install the same "
        "everywhere",
        "1: the clock of rank 1 (host b, 10.0.0.2) is 7.5 s ahead of that of rank 0; set both by a time server (NTP), "
        "so that what logs and files say of time compares",
    ]
    assert "is 9.0 s behind that of rank 0" in texts(CARDS, {**FINE, 1: ReachReport({}, ahead=9, exact=0.1)})[0]
    assert texts(CARDS, {**FINE, 1: ReachReport({}, ahead=9, exact=5)}) == []  # it may be 4 s


def test_a_name_that_stands_for_the_loopback_is_named_on_several_hosts_only() -> None:
    hidden = {rank: replace(card, address="127.0.1.1", interface="lo") for rank, card in CARDS.items()}
    unreached = {0: ReachReport({1: "connection refused"}), 1: ReachReport({0: "connection refused"})}
    assert texts(hidden, unreached) == [
        f"{rank}: rank {rank} (host {host}, 127.0.1.1) listens on the loopback, which other hosts do not reach: on "
        f"{host} the name '{host}' stands for 127.0.1.1 (/etc/hosts); give it the address 10.0.0.{rank + 1} there, or "
        "export GLOO_SOCKET_IFNAME=eth0"
        for rank, host in enumerate("ab")
    ]
    asked = {**CARDS, 1: replace(hidden[1], asked="lo", by="")}
    assert texts(asked, {0: unreached[0], 1: FINE[1]}) == [
        "1: rank 1 (host b, 127.0.1.1) listens on the loopback, which other hosts do not reach: GLOO_SOCKET_IFNAME is "
        "'lo'"
    ]
    assert texts({rank: replace(card, place="one") for rank, card in hidden.items()}, FINE) == []


def test_what_a_rank_could_not_do_is_said() -> None:
    cards = {**CARDS, 1: replace(CARDS[1], address="", port=0, wrong="cannot listen")}
    assert texts(cards, {0: ReachReport({}, messages="a wrong sum")}) == [
        "1: rank 1 (host b): cannot listen",
        "0: rank 1 (host b) has ended, or is too slow to say what it found; look at what it printed",
        "0: rank 0 (host a, 10.0.0.1): a wrong sum",
    ]
    assert "nowhere" in Health(cards, {}, ()).table()


# -- In this process ---------------------------------------------------------------------------------------------------


def launched(rank: int = 0, size: int = 2, port: int = 1) -> Launch:
    return Launch("torchrun", rank, size, rank, "127.0.0.1", port)


def test_a_rank_that_does_not_come_is_named() -> None:
    health = check(Met(dist.HashStore(), launched()), limit=0.2)  # type: ignore[attr-defined]
    [problem] = health.problems
    assert re.fullmatch(
        rf"rank 1 has not come to 127.0.0.1:1 in 0.2 s; there are rank 0 \(host .*\), process {os.getpid()}",
        problem.text,
    )
    health = check(Met(dist.HashStore(), launched(rank=2, size=4)), limit=0.2)  # type: ignore[attr-defined]
    assert health.problems[0].text.startswith("ranks 0, 1, 3 have not come to 127.0.0.1:1 in 0.2 s; there are rank 2 (")
    assert health.problems[0].rank == 2
    assert "2     " in health.table()


def test_where_nobody_listens_is_named() -> None:
    with pytest.raises(
        RuntimeStateError,
        match=r"^rank 1 does not reach rank 0 at 127.0.0.1:\d+ in 0.2 s: connection refused; check that it runs there, "
        r"that this host reaches the address, and that no firewall is in between$",
    ):
        join(launched(rank=1, port=free_port()), limit=0.2)
    worker = Launch("the scheduler", None, 2, None, "127.0.0.1", free_port())
    with pytest.raises(RuntimeStateError, match=r"^a worker on .* does not reach the scheduler at 127.0.0.1:"):
        join(worker, limit=0.2)


# -- With processes ----------------------------------------------------------------------------------------------------

DOCTOR = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = "import sys\nfrom partway.commands.cli import app\napp(['doctor', '--timeout', '20'])\n"
OTHER_VERSION = """
    import os, sys
    from partway.doctor import reach
    from partway.runtime.launching.launchers import launch

    health = reach.check(reach.join(launch(), 20), 20, versions=f"partway 0.{os.environ['RANK']}")
    if os.environ["RANK"] == "0":
        print(*(problem.text for problem in health.problems), sep="\\n")
"""


def ranks(text: str, folder: Path, arguments: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(textwrap.dedent(text), encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *(arguments or DOCTOR), "script.py"], cwd=folder, check=False, capture_output=True, text=True,
        env={**kept, "OMP_NUM_THREADS": "1", **variables}, timeout=120,
    )  # fmt: skip


@pytest.mark.gloo
def test_two_ranks_reach_each_other(tmp_path: Path) -> None:
    ended = ranks(COMMAND, tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.strip().splitlines()
    assert lines[-1] == "2 ranks on 1 host reach each other"
    assert sum(line.startswith("torch ") for line in lines) == 1, "rank 1 says nothing where nothing is wrong"
    assert re.search(r"^launcher  torchrun: 2 processes, which meet at \S+:\d+$", ended.stdout, re.M)
    assert re.search(r"^1     \S+ +\d+ +127\.\S+ \(lo\) +[+-]\d\.\d\d ms ± \d\.\d\d +partway", ended.stdout, re.M) or (
        re.search(r"^1     \S+ +\d+ +\S+:\d+ \(\S+\) +[+-]\d+\.\d\d ms ± \d+\.\d\d +partway", ended.stdout, re.M)
    )


@pytest.mark.gloo
def test_what_is_wrong_with_a_host_is_said_once(tmp_path: Path) -> None:
    ended = ranks(COMMAND, tmp_path, PARTWAY_VERIFY="yes")
    assert ended.returncode == 1
    assert ended.stdout.count("wrong     PARTWAY_VERIFY is 'yes', which changes nothing: ") == 1
    assert "2 ranks on 1 host reach each other" in ended.stdout


@pytest.mark.slow
@pytest.mark.gloo
def test_versions_that_differ_are_said_once(tmp_path: Path) -> None:
    ended = ranks(OTHER_VERSION, tmp_path)
    assert re.search(r"rank 1 \(.*\) runs partway 0\.1, and rank 0 partway 0\.0; install the same", ended.stdout), ended


@pytest.mark.slow
@pytest.mark.gloo
def test_an_interface_that_is_not_there_is_said_with_those_that_are(tmp_path: Path) -> None:
    ended = ranks(COMMAND, tmp_path, GLOO_SOCKET_IFNAME="nope0")
    assert ended.returncode == 1
    wrong = r"rank 1 \(host \S+\): GLOO_SOCKET_IFNAME is 'nope0', and this host has no interface 'nope0'; export the"
    assert re.search(wrong + r" name of one by which the others reach it, of .*lo", ended.stderr), ended.stderr


@pytest.mark.slow
@pytest.mark.gloo
def test_the_scheduler_brings_them_together_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COMMAND, encoding="utf-8")
    given = {
        **os.environ, "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "script.py"]
    started = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**given, "MS_ROLE": role},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in ("MS_SCHED", "MS_WORKER", "MS_WORKER")
    ]
    said = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    [out] = [out for out, _ in said if out]
    assert out.strip().endswith("2 ranks on 1 host reach each other")


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("fault", ["none", "debian", "other net", "absent"])
def test_two_hosts(fault: str) -> None:
    """On each a rank. On Debian a host's name stands for its loopback, which hides it; an interface may be in a net
    that the other does not reach; or a rank never comes."""
    if why := namespaces.unavailable():
        pytest.skip(why)
    with namespaces.several_hosts(2, debian=fault == "debian") as hosts:
        given = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        own = {**given, "RANK": "1"}
        if fault == "other net":
            other = hosts[1]
            assert other.run(["ip", "link", "add", "away", "type", "veth", "peer", "name", "far"]).returncode == 0
            assert other.run(["ip", "address", "add", "10.255.255.1/24", "dev", "away"]).returncode == 0
            assert other.run(["ip", "link", "set", "away", "up"]).returncode == 0
            own["GLOO_SOCKET_IFNAME"] = "away"
        command = [sys.executable, "-c", COMMAND.replace("20", "8" if fault == "absent" else "20")]
        started = [hosts[0].start(command, {**given, "RANK": "0"})]
        if fault != "absent":
            started.append(hosts[1].start(command, own))
        first, *others = [namespaces.finished(process) for process in started]
    if fault == "none":
        assert first.returncode == others[0].returncode == 0, first
        assert first.stdout.strip().endswith("2 ranks on 2 hosts reach each other")
        return
    assert first.returncode == 1
    expected = {
        "debian": rf"rank 1 \(host two, 127.0.1.1\) listens on the loopback.* give it the address {hosts[1].address} "
        rf"there, or export GLOO_SOCKET_IFNAME={hosts[1].device}",
        "other net": r"rank 0 \(host one, .*\) cannot reach rank 1 \(host two, 10.255.255.1\) at port \d+: network is "
        "unreachable; check GLOO_SOCKET_IFNAME on both hosts",
        "absent": r"rank 1 has not come to .*:29500 in 8 s; there are rank 0 \(host one, .*\), process \d+",
    }[fault]
    assert re.search(expected, first.stderr), first.stderr
    if fault == "debian":
        assert "rank 1 (host two" in others[0].stderr
        assert "rank 0 (host one" not in others[0].stderr, "each says what is wrong with itself"
