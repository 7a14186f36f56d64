"""One script under every launcher: the losses of one process, and the right ranks.

`pytest -s` prints the table of docs/design/launching.md: how far the losses of each are from those of one process, and
how long it took.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import namespaces
import pytest
import slurm
from scripts import free_port

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(300)]

SCRIPT = '''
"""The MLP of the digits."""

import json
import os
import socket
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import partway as pw
from partway.runtime.launching.launchers import launch


def train():
    torch.set_num_threads(1)
    devices = pw.init(simulate=4)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    ).double()
    model = pw.shard(net, mesh={"dp": devices // 2, "tp": 2}, in_strategy=(("dp", None),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(12):
        rows = slice(step * 64, step * 64 + 64)
        loss = nn.functional.cross_entropy(model(images[rows] / 16), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(repr(loss.item()))
    found = launch()
    told = {
        "rank": pw.get_rank(), "size": pw.get_group_size(), "devices": devices, "local": pw.get_local_rank(),
        "host": socket.gethostname(), "losses": losses, "launcher": found.launcher if found else "none",
    }
    Path(__file__).with_name(f"{os.getpid()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    train()
'''
RAY = """
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import script

ray.init(num_cpus=4, include_dashboard=False)
run = RunConfig(name="run", storage_path=sys.argv[2])
TorchTrainer(script.train, scaling_config=ScalingConfig(num_workers=int(sys.argv[1])), run_config=run).fit()
"""
OURS = ("SLURM_", "OMPI_", "PMI_", "MS_", "MPI_", "RAY_")


@dataclass(frozen=True)
class Place:
    """The folder of the script, and the environment without any launcher's variables."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def script(self) -> list[str]:
        return [sys.executable, str(self.folder / "script.py")]

    def run(self, *commands: Sequence[str], each: Sequence[Mapping[str, str]] = ({},)) -> None:
        """Run commands side by side, or one with `each` of these variables more; all have to end well."""
        every = [(command, more) for command in commands for more in each]
        started = [
            subprocess.Popen(
                command, cwd=self.folder, env={**self.environment, **more}, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            for command, more in every
        ]  # fmt: skip
        ended = [namespaces.finished(process, 250) for process in started]
        assert [process.returncode for process in ended] == [0] * len(ended), ended

    @contextmanager
    def hosts(self, number: int) -> Iterator[tuple[namespaces.Host, ...]]:
        """Hosts, which the test does without where there are none."""
        if why := namespaces.unavailable():
            pytest.skip(why)
        with namespaces.several_hosts(number) as hosts:
            yield hosts

    def run_on(self, *tasks: tuple[namespaces.Host, Sequence[str], Mapping[str, str]]) -> None:
        started = [host.start(command, {**self.environment, **more}, self.folder) for host, command, more in tasks]
        ended = [namespaces.finished(process, 250) for process in started]
        assert [process.returncode for process in ended] == [0] * len(ended), ended


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def plain(place: Place) -> None:
    place.run(place.script)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PARTWAY = [sys.executable, "-c", "from partway.commands.cli import app; app()", "run"]


def torchrun(place: Place) -> None:
    place.run([*TORCHRUN, "--standalone", "--nproc-per-node=4", place.script[1]])


def torchrun_twice(place: Place) -> None:
    meet = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--local-addr=127.0.0.1", meet]
    place.run(*[[*agent, place.script[1]]] * 2)


def partway_run(place: Place) -> None:
    place.run([*PARTWAY, "--workers", "4", place.script[1]])


def partway_run_on(number: int, each: int) -> Callable[[Place], None]:
    """The command that `partway run --hosts` prints, on each host."""

    def run(place: Place) -> None:
        with place.hosts(number) as hosts:
            names = ",".join(host.name for host in hosts)
            asked = [*PARTWAY, "--hosts", names, "--workers", str(each), place.script[1]]
            said = subprocess.run(asked, env=dict(place.environment), capture_output=True, text=True, check=True).stdout
            *_, command = said.strip().splitlines()
            program, verb, *arguments = command.split()
            assert (program, verb) == ("partway", "run")
            place.run_on(*((host, [*PARTWAY, *arguments], {}) for host in hosts))

    return run


def torchrun_on(number: int, each: int) -> Callable[[Place], None]:
    def run(place: Place) -> None:
        with place.hosts(number) as hosts:
            agent = [*TORCHRUN, f"--nnodes={number}", f"--nproc-per-node={each}", "--master-addr=one"]
            place.run_on(*(
                (host, [*agent, f"--node-rank={node}", "--master-port=29500", place.script[1]], {})
                for node, host in enumerate(hosts)
            ))  # fmt: skip

    return run


def roles(host: str, port: int, workers: int = 4) -> list[dict[str, str]]:
    """The variables of a scheduler and its workers."""
    given = {"MS_WORKER_NUM": str(workers), "MS_SCHED_HOST": host, "MS_SCHED_PORT": str(port)}
    return [{**given, "MS_ROLE": "MS_SCHED"}, *({**given, "MS_ROLE": "MS_WORKER"} for _ in range(workers))]


def scheduler(place: Place) -> None:
    place.run(place.script, each=roles("127.0.0.1", free_port()))


def scheduler_on(number: int, each: int) -> Callable[[Place], None]:
    def run(place: Place) -> None:
        with place.hosts(number) as hosts:
            first, *workers = roles(hosts[0].address, 6667, number * each)
            given = zip([host for host in hosts for _ in range(each)], workers, strict=True)
            place.run_on((hosts[0], place.script, first), *((host, place.script, own) for host, own in given))

    return run


def ray(workers: int) -> Callable[[Place], None]:
    def run(place: Place) -> None:
        if find_spec("ray") is None:
            pytest.skip("Ray is not installed")
        (place.folder / "by_ray.py").write_text(RAY, encoding="utf-8")
        own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        place.run([sys.executable, "by_ray.py", str(workers), str(place.folder / "ray")], each=[own])

    return run


def open_mpi(place: Place) -> None:
    needs("mpirun.openmpi")
    place.run(["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "4", *place.script])


def mpich(place: Place) -> None:
    needs("mpiexec.hydra")
    place.run(["mpiexec.hydra", "-n", "4", *place.script])


def slurms_variables(place: Place) -> None:
    given = {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "here", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    ranks = map(str, range(4))
    place.run(place.script, each=[{**given, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ranks])


def srun(place: Place) -> None:
    with slurm.node(place.folder / "slurm") as found:
        place.run(["srun", "-n", "4", "--overcommit", *place.script], each=[found])


def told(run: Callable[[Place], None], folder: Path) -> list[dict[str, Any]]:
    """What the processes of a job told, by rank."""
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        kept.pop(name, None)
    run(Place(folder, {**kept, "OMP_NUM_THREADS": "1", "PARTWAY_CACHE": "0"}))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("[0-9]*.json")]
    return sorted(found, key=lambda one: int(one["rank"]))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, which simulates four devices."""
    start = time.perf_counter()
    [alone] = told(plain, tmp_path_factory.mktemp("plain"))
    assert (alone["rank"], alone["size"], alone["devices"], alone["launcher"]) == (0, 1, 4, "none")
    losses = [float(loss) for loss in alone["losses"]]
    assert losses[-1] < losses[0]
    sys.stdout.write(f"\n| one process | | {time.perf_counter() - start:.0f} s |\n")
    return losses


@pytest.mark.parametrize(("name", "run", "launcher", "locals_"), [
    ("torchrun", torchrun, "torchrun", [0, 1, 2, 3]),
    ("torchrun, 2 x 2", torchrun_twice, "torchrun", [0, 1, 0, 1]),
    ("partway run", partway_run, "torchrun", [0, 1, 2, 3]),
    ("the scheduler", scheduler, "the scheduler", [0, 1, 2, 3]),
    ("Ray Train, 2 workers", ray(2), "torchrun", [0, 1]),
    ("Ray Train, 4 workers", ray(4), "torchrun", [0, 1, 2, 3]),
    ("mpirun of Open MPI", open_mpi, "mpirun (Open MPI)", [0, 1, 2, 3]),
    ("mpiexec of MPICH", mpich, "mpirun (MPICH or Intel MPI)", [0, 1, 2, 3]),
    ("Slurm's variables", slurms_variables, "srun (Slurm)", [0, 1, 2, 3]),
    ("srun", srun, "srun (Slurm)", [0, 1, 2, 3]),
    *(
        pytest.param(f"{name}, {hosts} hosts x {each}", on(hosts, each), launcher, locals_, marks=pytest.mark.hosts)
        for hosts, each, locals_ in ((2, 1, [0, 0]), (2, 2, [0, 1, 0, 1]), (4, 1, [0, 0, 0, 0]))
        for name, on, launcher in (
            ("torchrun", torchrun_on, "torchrun"), ("partway run", partway_run_on, "torchrun"),
            ("the scheduler", scheduler_on, "the scheduler"),
        )
    ),
])  # fmt: skip
def test_a_launcher_has_the_losses_of_one_process(
    name: str, run: Callable[[Place], None], launcher: str, locals_: list[int], expected: list[float], tmp_path: Path
) -> None:  # fmt: skip
    start = time.perf_counter()
    ranks = told(run, tmp_path)
    took = time.perf_counter() - start
    size = len(locals_)
    assert [one["rank"] for one in ranks] == list(range(size))
    assert {(one["size"], one["devices"], one["launcher"]) for one in ranks} == {(size, size, launcher)}
    if "hosts" in name:  # whose order is that in which their processes come
        hosts = sorted({one["host"] for one in ranks})
        assert len(hosts) == locals_.count(0)
        assert [one["local"] for host in hosts for one in ranks if one["host"] == host] == locals_
    else:
        assert [one["local"] for one in ranks] == locals_
    apart = max(abs(float(loss) - right) for one in ranks for loss, right in zip(one["losses"], expected, strict=True))
    sys.stdout.write(f"\n| {name} | {apart:.1e} | {took:.0f} s |\n")
    assert apart < 1e-12
