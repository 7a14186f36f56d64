"""Several hosts with slow links: what `partway calibrate` finds, which plans follow, and a link that is cut.

The hosts are network namespaces of this machine. tests/ecosystem/test_every_launcher.py trains on them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import faults
import namespaces
import pytest
import torch
from torch import nn

import partway as pw
from partway.propagation.cost.cost import wire_bytes
from partway.propagation.cost.profile import DeviceProfile, NetworkLevel, PeakRates, profile_of
from partway.strategy.placement import Kind

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(900)]

CALIBRATE = """
import sys
from partway.commands.cli import app
from partway.measure import calibrate

calibrate.QUICK = calibrate.Effort(
    (1 << 12, 1 << 22, 1 << 23), repeats=3, copied=1 << 16, product=1e-5, probes=lambda times: ()
)
app(["calibrate", "--quick", *sys.argv[1:]])
"""
RATES = {"500mbit": 62.5e6, "1gbit": 125e6, "10gbit": 1250e6}  # bytes/s
SHAPES = [(2, 1), (2, 2), (4, 1)]  # hosts, and processes on each


@pytest.fixture(autouse=True)
def _allowed() -> None:
    if why := namespaces.unavailable():
        pytest.skip(why)


def calibrated(hosts: tuple[namespaces.Host, ...], each: int, folder: Path, *arguments: str) -> list[str]:
    """What torchrun's agents on the hosts say, with a process for each rank, which calibrate into here.json."""
    (folder / "calibrate.py").write_text(CALIBRATE, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        host.start([
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank", str(number),
            "--nproc-per-node", str(each), "--master-addr", hosts[0].address, "--master-port", "29500",
            "calibrate.py", "--out", "here.json", *arguments,
        ], environment, folder)
        for number, host in enumerate(hosts)
    ]  # fmt: skip
    ended = [namespaces.finished(process, 280) for process in started]
    assert [process.returncode for process in ended] == [0] * len(hosts), ended
    return [process.stdout for process in ended]


def sent_by_a_host(level: NetworkLevel, each: int) -> float:
    """The bytes/s of all devices of a host, in an all_reduce of two hosts."""
    sizes = level.bandwidth.of(Kind.ALL_REDUCE)
    assert isinstance(sizes, tuple)
    return each * dict(sizes)[2] * wire_bytes(Kind.ALL_REDUCE, 1, 2)


def sent_by_the_plan(profile: DeviceProfile, ranks: int, folder: Path) -> float:
    """The bytes that a rank sends in the fastest step of a perceptron on devices of 150 GFLOP/s with this network. None
    if each device computes all of it, which is as fast as a split at about 150 MB/s."""
    pw.set_algo_parameters(fully_use_devices=False)
    path, peak = folder / "priced.json", PeakRates(float64=1.5e11, float32=1.5e11, bfloat16=1.5e11, float16=1.5e11)
    figures = {"name": "priced", "peak": peak, "levels": profile.levels}
    profile_of("cpu").model_copy(update=figures).save(path)
    width, rows = 1024, 1365
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    with pw.auto_parallel_context(device_profile=str(path)):
        model = pw.shard(net, mesh={"x": ranks}, in_strategy=((None, None),), level=2)
        model.prepare(torch.empty(rows, width))
    return model.plan.wire_bytes


@pytest.mark.parametrize(("number", "each"), SHAPES)
def test_the_measured_bandwidth_is_that_of_the_link_and_plans_send_less_over_a_slow_one(
    number: int, each: int, tmp_path: Path
) -> None:
    measured, sent = [], []
    with namespaces.several_hosts(number) as hosts:
        for rate, bytes_per_second in RATES.items():
            for host in hosts:
                host.limit(rate)
            said, *others = calibrated(hosts, each, tmp_path)
            assert "wrote here.json" in said
            assert not any(text.strip() for text in others)
            profile = profile_of(tmp_path / "here.json")
            assert [level.devices for level in profile.levels] == ([each, None] if each > 1 else [None])
            assert profile.levels[-1].name == "gloo between hosts"
            assert f"{number * each} processes on {number} hosts" in profile.levels[-1].source
            found = sent_by_a_host(profile.levels[-1], each)
            sys.stdout.write(f"\n{number} x {each}, {rate}: {found / bytes_per_second:.2f} of the link's rate")
            assert found < 1.5 * bytes_per_second  # small payloads pass at once: the bucket holds 256 KB
            measured.append(found)
            sent.append(sent_by_the_plan(profile, number * each, tmp_path))
            sys.stdout.write(f"; {found / 1e6:.0f} MB/s, plan sends {sent[-1]:.0f}\n")
    assert measured[0] < measured[1] < measured[2]
    assert measured[0] > RATES["500mbit"] / 4
    assert sent[0] == 0 < sent[2]


def test_a_link_that_is_slower_than_the_others_is_that_of_the_profile(tmp_path: Path) -> None:
    with namespaces.several_hosts(4, "1gbit") as hosts:
        hosts[3].limit("200mbit")
        calibrated(hosts, 1, tmp_path)
    found = sent_by_a_host(profile_of(tmp_path / "here.json").levels[-1], 1)
    sys.stdout.write(f"\none of four links at 200 Mbit/s: {found / 25e6:.2f} of its rate\n")
    assert found < 1.5 * 25e6


def test_hosts_with_unequal_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "calibrate.py").write_text(CALIBRATE, encoding="utf-8")
    with namespaces.several_hosts(2) as hosts:
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "one",
            "MASTER_PORT": "29500",
        }
        places = enumerate((hosts[0], hosts[0], hosts[1]))
        started = [
            host.start(
                [sys.executable, "calibrate.py"],
                {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
                tmp_path,
            )
            for rank, host in places
        ]
        ended = [namespaces.finished(process, 120) for process in started]
    said = "partway calibrate: in the order of the ranks there are 2 ranks on one, 1 rank on two; a profile describes"
    assert [process.returncode for process in ended] == [2, 2, 2], ended
    assert all(said in process.stderr for process in ended), ended


def test_a_cut_link_ends_a_job_on_four_hosts_with_the_name_of_the_rank_behind_it(tmp_path: Path) -> None:
    with namespaces.several_hosts(4) as hosts:
        job = faults.by_the_scheduler(tmp_path, 0, workers=4, MS_SCHED_HOST=hosts[0].address)
        place = {"scheduler": hosts[0], **{str(rank): host for rank, host in enumerate(hosts)}}
        job.start = {name: (place[name].command(command), own) for name, (command, own) in job.start.items()}
        job.ports = ()
        outcome = job.run(lambda job: hosts[2].cut(), limit=240)
    assert outcome.left == [], outcome
    assert all(code != 0 for code in outcome.codes.values()), outcome
    found = re.search(r"rank (\d) \(process \d+ on (\w+) .* has not answered for \d+ s", outcome.said["scheduler"])
    assert found, outcome
    assert found.groups() == ("2", "three")
