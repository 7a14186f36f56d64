"""Jobs with a parameter server in which something dies, comes or goes: nothing that was acknowledged is lost, nothing
is applied twice, and in sync mode the parameters are those of the same job without faults, to the last bit.

PARTWAY_FAULTS=FILE adds a row to a table for each.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Job, by_variables, difference, job, kept_steps, scale
from served_script import one_device

pytest.importorskip("ray")
lmdb = pytest.importorskip("lmdb")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("ranks 0")]

Fault = Callable[[Job], None]


def told(name: str, own: Job, text: str) -> None:
    """A row of the table: pushes sent and acknowledged, steps in the servers' records; seconds until the next step."""
    steps = own.steps()
    wait = max((later[1] - one[1] for one, later in itertools.pairwise(steps)), default=0.0)
    applied = min(kept_steps(own).values(), default=0)
    counts = own.counts()
    row = f"| {name} | {counts['sent']} | {counts['acknowledged']} | {applied} | {wait:.1f} | {text} |"
    sys.stdout.write(row + "\n")
    if path := os.environ.get("PARTWAY_FAULTS"):
        with open(path, "a") as file:
            file.write(row + "\n")


def status(own: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((own.folder / "status.json").read_text())
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The final state of a job without faults, by its options: once each."""
    known: dict[str, dict[str, Any]] = {}

    def of(**options: Any) -> dict[str, Any]:
        name = json.dumps(options, sort_keys=True)
        if name not in known:
            with job(tmp_path_factory.mktemp("plain"), 2, 2, **options) as own:
                own.end()
                known[name] = own.final()
        return known[name]

    return of


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_all(own: Job, what: str) -> None:
    pids = own.pids(what)
    assert pids, f"no {what}"
    for pid in pids:
        kill(pid)


def stop(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def kill_after_commit(own: Job, step: int) -> None:
    """Kill a server when its records have a step, which nobody has been told of: it still gathers what changed."""
    own.until(1)  # there are servers, and records
    pids = own.pids("_ServerActor")
    folder = own.folder / "shards" / "server0"
    with lmdb.open(str(folder), readonly=True, map_size=2**40) as env:
        while True:
            with env.begin() as transaction:
                if json.loads(transaction.get(b"meta"))["version"] >= step:
                    break
    for pid in pids:
        kill(pid)


FAULTS: dict[str, tuple[dict[str, Any], Fault]] = {
    "worker, in forward": ({"die_in_forward": "1:10"}, lambda own: None),
    "worker, in push": ({"die_in_push": "1:10"}, lambda own: None),
    "server": ({"nap": 0.1}, lambda own: (own.until(8), kill(own.server()))[0]),
    "servers, after their commit": ({"width": 20000}, lambda own: kill_after_commit(own, 10)),
    "coordinator": ({"nap": 0.1}, lambda own: (own.until(8), kill_all(own, "_CoordinatorActor"))[0]),
    "scheduler": ({"nap": 0.1}, lambda own: (own.until(8), kill_all(own, "import scheduler"))[0]),
    "Ray's head": ({"nap": 0.1}, lambda own: (own.until(8), kill_all(own, "gcs/gcs_server"))[0]),
    "raylet": ({"nap": 0.1}, lambda own: (own.until(8), kill_all(own, "raylet/raylet"))[0]),
    "worker and server": ({"nap": 0.1}, lambda own: (own.until(8), kill(own.server()), kill(own.worker(1)))[0]),
    "both workers": ({"nap": 0.1}, lambda own: (own.until(8), kill(own.worker(0)), kill(own.worker(1)))[0]),
    "both servers": ({"nap": 0.1}, lambda own: (own.until(8), kill_all(own, "_ServerActor"))[0]),
    "worker stopped for 20 s": ({"nap": 0.1}, lambda own: (own.until(8), stop(own.worker(1), 20))[0]),
    "server stopped for 20 s": ({"nap": 0.1}, lambda own: (own.until(8), stop(own.server(), 20))[0]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_sync_training_goes_on_with_the_same_bits(
    fault: str, plain: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    options, act = FAULTS[fault]
    width = {"width": options["width"]} if "width" in options else {}
    reference = plain(steps=30, dropout=0.1, **width)
    with job(tmp_path / "job", 2, 2, steps=30, dropout=0.1, **options) as own:
        act(own)
        own.end()
        assert difference(reference, own.final()) == 0.0
        assert kept_steps(own) == {"server0": 30, "server1": 30}
        done = {each[0] for each in own.steps(0)}
        assert len(done) >= 29  # one that was killed may not have written the line of its last step
        assert done <= set(range(30))
        assert own.counts()["refused"] == 0
        told(fault, own, "same bits")


def test_a_server_that_dies_within_the_optimizers_step_takes_it_again(
    plain: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    reference = plain(steps=20)
    with job(tmp_path / "job", 2, 2, steps=20, optimizer="killer", nap=0.05) as own:
        own.until(5)
        (own.folder / "kill_in_step").touch()
        own.end()
        assert not (own.folder / "kill_in_step").exists()
        assert difference(reference, own.final()) == 0.0
        told("server, before its commit", own, "same bits")


def test_ten_random_kills_in_one_run(plain: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    reference = plain(steps=60, dropout=0.1)
    draw = random.Random(7)
    with job(tmp_path / "job", 2, 2, steps=60, dropout=0.1, nap=0.1) as own:
        for _ in range(10):
            done = len(own.steps())
            time.sleep(draw.uniform(0.2, 1.0))
            what = draw.choice(["_ServerActor", "_CoordinatorActor", "served_script.py", "import scheduler"])
            pids = own.pids(what)
            if pids:
                kill(draw.choice(pids))
            own.wait_for(lambda least=done + 3: len(own.steps()) >= min(least, 58), "steps after a kill")
        own.end()
        assert difference(reference, own.final()) == 0.0
        assert kept_steps(own) == {"server0": 60, "server1": 60}
        told("ten random kills", own, "same bits")


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_disk_is_waited_for(plain: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    reference = plain(steps=30, dropout=0.1)
    disk = tmp_path / "disk"
    with (
        small_disk(disk, 600),
        job(tmp_path / "job", 2, 2, steps=30, dropout=0.1, nap=0.1, PARTWAY_PS_FOLDER=disk) as own,
    ):
        own.until(8)
        filler = disk / "filler"
        with suppress(OSError), open(filler, "wb") as file:
            while True:
                file.write(b"\0" * 2**20)
        time.sleep(3)
        filler.unlink()
        own.end()
        assert difference(reference, own.final()) == 0.0
        told("a full disk for 3 s", own, "same bits")


def test_async_pushes_are_applied_once_whoever_dies(tmp_path: Path) -> None:
    draw = random.Random(3)
    with job(tmp_path / "job", 3, 2, steps=60, mode="async", bound=6, nap=0.05) as own:
        for what in ("_ServerActor", "served_script.py", "_CoordinatorActor", "_ServerActor"):
            done = len(own.steps())
            own.wait_for(lambda name=what: own.pids(name), what)
            kill(draw.choice(own.pids(what)))
            own.wait_for(lambda least=done + 3: len(own.steps()) >= min(least, 58), "steps after a kill")
        own.end()
        reports = status(own)["reports"]
        assert all(set(report["seen"].values()) <= set(range(1, 61)) for report in reports)
        stale = json.loads((own.folder / "staleness.json").read_text())
        assert max(each[2] for each in stale) <= 6
        assert kept_steps(own) == {"server0": 180, "server1": 180}  # 3 workers, 60 steps each: none lost, none twice
        told("async: two servers, a worker, the coordinator", own, "each push once")


def test_workers_and_servers_come_and_go_while_it_trains(tmp_path: Path) -> None:
    with job(tmp_path / "job", 1, 1, steps=400, nap=0.05) as own:
        own.until(5)
        scale(own, "--workers", "3", "--servers", "3")
        own.wait_for(lambda: any(each[4] == 3 for each in own.steps()), "three workers")
        own.wait_for(lambda: len(list((own.folder / "shards").glob("server*"))) == 3, "three servers")
        more = len(own.steps())
        own.until(more + 10)
        scale(own, "--workers", "2", "--servers", "2")
        own.wait_for(lambda: own.steps()[-1][4] == 2, "two workers")
        own.wait_for(lambda: len(list((own.folder / "shards").glob("server*"))) == 2, "two servers")
        own.end(300)
        steps = own.steps(0)
        assert [each[0] for each in steps] == list(range(400))
        plain = one_device(400)[0]
        assert difference(plain, own.final()) < 1e-12
        counts = [each[4] for each in steps]
        changes = [(i, counts[i]) for i in range(1, 400) if counts[i] != counts[i - 1]]
        seconds = {n: [b[1] - a[1] for a, b in itertools.pairwise(steps) if a[4] == b[4] == n] for n in set(counts)}
        rates = {n: round(len(each) / sum(each), 1) for n, each in seconds.items() if each}
        told(f"1, 3, 2 workers and servers: {changes}, steps a second {rates}", own, "one device to 1e-12")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_sync_is_one_device(workers: int, servers: int, optimizer: str, tmp_path: Path) -> None:
    """A recommender, a perceptron and a vision transformer, their losses at each step and their parameters."""
    plain, losses = one_device(20, optimizer, more=True)
    finals, worst = [], 0.0
    for again in range(2 if workers == servers == 2 else 1):
        with job(tmp_path / f"job{again}", workers, servers, steps=20, optimizer=optimizer, more=1) as own:
            own.end()
            finals.append(own.final())
            parts = [[each[2] for each in own.steps(worker)] for worker in range(workers)]
            means = torch.tensor(parts, dtype=torch.float64).mean(0)
            worst = float((means - torch.tensor(losses, dtype=torch.float64)).abs().max())
    text = f"{difference(plain, finals[0]):.1e} of parameters, {worst:.1e} of losses"
    sys.stdout.write(f"{optimizer}, {workers} workers, {servers} servers: {text}\n")
    assert worst < 1e-12
    assert difference(plain, finals[0]) < 1e-12
    assert difference(finals[0], finals[-1]) == 0.0  # twice the same bits


def test_what_is_not_named_stays_on_the_workers(tmp_path: Path) -> None:
    with job(tmp_path / "job", 2, 2, steps=20, part="table", optimizer="adamw", die_in_forward="1:10") as own:
        own.end()
        assert difference(one_device(20, "adamw")[0], own.final()) < 1e-12


def test_processes_started_by_hand_come_and_go(tmp_path: Path) -> None:
    """The scheduler, servers and workers by MS_ROLE; a server and a worker more meanwhile; a server that is asked to
    end."""
    with by_variables(tmp_path / "job", 1, 1, steps=150, nap=0.1) as start:
        scheduler, first = start("MS_SCHED"), start("MS_PSERVER")
        worker = start("MS_WORKER", MS_NODE_ID="0")
        own = Job(tmp_path / "job", worker)
        own.until(3)
        second, other = start("MS_PSERVER"), start("MS_WORKER", MS_NODE_ID="1")
        own.wait_for(lambda: any(each[4] == 2 for each in own.steps()), "two workers")
        time.sleep(3)
        first.terminate()
        assert first.wait(60) == 0
        for process in (worker, other, second, scheduler):
            assert process.wait(120) == 0
        assert difference(one_device(150)[0], own.final()) < 1e-12
        assert status(own)["servers"] == ["server1"]


def config(folder: Path, authority: Any) -> Path:
    """The file that names certificates of an authority."""
    names = {"server_cert_path": "server", "client_cert_path": "client"}
    facts = {key: str(authority.sign(f"{authority.name}-{name}", address="127.0.0.1")) for key, name in names.items()}
    path = folder / f"{authority.name}.json"
    path.write_text(json.dumps({**facts, "ca_cert_path": str(authority.file)}))
    path.chmod(0o600)
    return path


def test_with_certificates_a_stranger_is_refused(tmp_path: Path) -> None:
    certificates = pytest.importorskip("certificates")
    own_file = config(tmp_path, certificates.Authority(tmp_path, "own"))
    foreign = config(tmp_path, certificates.Authority(tmp_path, "foreign"))
    with by_variables(tmp_path / "job", 1, 1, steps=60, nap=0.2, config=own_file) as start:
        start("MS_SCHED")
        start("MS_PSERVER")
        worker = start("MS_WORKER", MS_NODE_ID="0")
        own = Job(tmp_path / "job", worker)
        own.until(2)
        strangers = [
            start("MS_WORKER", MS_NODE_ID="1", SERVED_CONFIG=str(foreign), MS_TOPO_TIMEOUT="5"),
            start("MS_WORKER", MS_NODE_ID="2", SERVED_CONFIG="", MS_TOPO_TIMEOUT="5"),
            start("MS_WORKER", MS_NODE_ID="3", PARTWAY_JOB_SECRET="not the job's secret", MS_TOPO_TIMEOUT="5"),
        ]
        assert worker.wait(120) == 0
        assert difference(one_device(60)[0], own.final()) < 1e-12
        assert list(status(own)["workers"]) == ["0"]  # and no other has come
        for stranger in strangers:
            assert stranger.poll() != 0  # Ray's client tries for minutes
            stranger.kill()
            stranger.wait()


GROUP = """
import sys, torch
from torch import nn
import partway as pw

torch.set_default_dtype(torch.float64)
pw.set_ps_context(enable_ps=True)
devices = pw.init(simulate=2)

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

plain = made()
model = pw.shard(made(), mesh={"dp": devices}, in_strategy=(("dp", None),), parameter_plan={"0.weight": ("dp", None)})
pw.set_param_ps(model if sys.argv[1] == "all" else model[0])
own, other = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain))
own = pw.ps.optimizer(own)
for step in pw.ps.steps(10):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    for each, optimizer in ((model, own), (plain, other)):
        loss = each(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
pairs = zip(whole, plain.parameters(), strict=True)
worst = max(float((one.detach() - two.detach()).abs().max()) for one, two in pairs)
assert worst < 1e-12, worst
state = own.state_dict()["state"][0]["exp_avg"]
assert torch.allclose(state, other.state_dict()["state"][0]["exp_avg"])
pw.ps.save(sys.argv[2], model)
pw.shutdown()
"""


@pytest.mark.parametrize("named", ["all", "one"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_may_be_a_group_of_ranks_or_of_virtual_devices(ranks: int, named: str, tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if ranks == 2 else []
    done = subprocess.run(
        [sys.executable, *launch, str(script), named, str(tmp_path / "saved")], capture_output=True, text=True,
        timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "saved" / "checkpoint-000001" / "model.safetensors").exists()
