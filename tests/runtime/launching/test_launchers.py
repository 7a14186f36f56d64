"""What started a process is read from its environment; what cannot be understood is an error, never a simulation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import slurm
from scripts import free_port, run_script

from partway.runtime.launching.launchers import Launch, first_host, host_name, launch, started, tell_ready
from partway.strategy import RuntimeStateError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
SCHEDULER = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8", "MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "6667"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_ess_base_jobid": "599523329",
}  # fmt: skip
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11],big1", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8",
}  # fmt: skip
BATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "4711"}


@pytest.mark.parametrize("alone", [
    {}, {"WORLD_SIZE": "1"}, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
    {**MPICH, "PMI_SIZE": "1"}, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"},  # the last is a shell of salloc
])  # fmt: skip
def test_one_process_may_simulate(alone: Mapping[str, str]) -> None:
    assert not started(alone)
    assert launch(alone) is None


@pytest.mark.parametrize(("env", "name"), [
    (TORCHRUN, "MASTER_ADDR"), (SCHEDULER, "MS_SCHED_HOST"), (OPEN_MPI, "MASTER_ADDR"),
])  # fmt: skip
@pytest.mark.parametrize("text", ["2001:db8::1", "[2001:db8::1]"])
def test_an_address_of_ipv6_may_have_brackets(env: Mapping[str, str], name: str, text: str) -> None:
    found = launch({**env, name: text})
    assert found is not None
    assert found.host == "2001:db8::1"
    assert found.where == f"[2001:db8::1]:{found.port}"


def test_each_launcher_is_read() -> None:
    told = {name: launch(env) for name, env in {
        "torchrun": TORCHRUN, "scheduler": SCHEDULER, "open mpi": OPEN_MPI, "mpich": MPICH, "slurm": SLURM,
    }.items()}  # fmt: skip
    assert all(map(started, (TORCHRUN, SCHEDULER, OPEN_MPI, MPICH, SLURM)))
    assert told["torchrun"] == Launch("torchrun", 3, 4, 1, "host0", 29500)
    assert told["scheduler"] == Launch("the scheduler", None, 8, None, "10.0.0.1", 6667)
    for name, rank, size, local, host in (
        ("open mpi", 1, 4, 1, "127.0.0.1"), ("mpich", 2, 4, 2, "127.0.0.1"), ("slurm", 5, 8, 1, "gpu07"),
    ):  # fmt: skip
        found = told[name]
        assert found is not None
        assert (found.rank, found.size, found.local_rank, found.host) == (rank, size, local, host)
        assert 20000 <= found.port < 32768


def test_hosts_of_one_name_are_told_apart_by_the_agents_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert host_name() == "here"
    monkeypatch.setenv("GROUP_RANK", "1")
    assert host_name() == "here/1"


def test_what_ray_started_is_no_task_of_what_started_ray() -> None:
    """srun starts a node of Ray on each host; its workers have srun's variables."""
    for of_the_node in (SLURM, OPEN_MPI, BATCH):
        assert not started({**of_the_node, "RAY_RAYLET_PID": str(os.getppid())})
        assert started({**of_the_node, "RAY_RAYLET_PID": "1"}), "mpirun was started by a worker of Ray"


def test_one_of_several_workers_of_ray_train_without_a_group_does_not_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: worker))
    assert started({})
    with pytest.raises(
        RuntimeStateError,
        match=r"^this is worker 1 of 2 of Ray Train, whose trainer has made no process group; train with its TorchTrai"
        r"ner \(ray.train.torch\), or call torch.distributed.init_process_group in each worker$",
    ):
        launch({})
    worker.get_world_size = lambda: 1
    assert not started({})


def test_jobs_meet_at_ports_of_their_own_unless_one_is_given() -> None:
    first, second = (launch({**SLURM, "SLURM_JOB_ID": job}) for job in ("4711", "4712"))
    assert first is not None
    assert second is not None
    assert first.job == "4711/0"
    assert (first.port, first.job) != (second.port, second.job)
    given = launch({**SLURM, "MASTER_ADDR": "login1", "MASTER_PORT": "29511"})
    assert given is not None
    assert (given.host, given.port) == ("login1", 29511)


@pytest.mark.parametrize(("hosts", "first"), [
    ("node1", "node1"), ("node[07-09,12],login1", "node07"), ("a,b[1-2]", "a"), ("r[1-2]n[3,5]x", "r1n3x"), ("", ""),
])  # fmt: skip
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_the_nearest_launcher_counts() -> None:
    inside = {**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "job"}
    assert launch(inside) == launch(TORCHRUN)
    found = launch({**SLURM, **OPEN_MPI})
    assert found is not None
    assert found.launcher == "mpirun (Open MPI)"
    alike = {**TORCHRUN, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}  # set by hand from Slurm's
    assert launch(alike) == launch(TORCHRUN)


@pytest.mark.parametrize(("variables", "text"), [
    ({"RANK": "0", "MS_ROLE": "MS_WORKER"},
     r"two launchers started this process: RANK=0 is torchrun's, and MS_ROLE=MS_WORKER the scheduler's; unset the"),
    ({**TORCHRUN, **OPEN_MPI},
     r"RANK=3 and WORLD_SIZE=4 are torchrun's, and mpirun \(Open MPI\) says OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_"
     r"SIZE=4; unset RANK and WORLD_SIZE, or set them alike"),
    ({"WORLD_SIZE": "4"}, r"^WORLD_SIZE=4 is set, but the environment has no RANK, .*; start it with a launcher such"),
    ({"MS_WORKER_NUM": "4"}, r"^MS_WORKER_NUM=4 is set, but the environment has no MS_ROLE, .* or unset MS_WORKER_NUM"),
    ({"MS_SCHED_HOST": "a"}, r"^MS_SCHED_HOST=a is set, but the environment has no MS_ROLE, .* or unset MS_SCHED_HOST"),
    ({"RANK": "3", "MASTER_ADDR": "a"}, r"torchrun started .* no WORLD_SIZE, MASTER_PORT; set what is missing, or"),
    ({"MS_ROLE": "MS_WORKER"}, r"the scheduler started .* no MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT; set what is"),
    ({**TORCHRUN, "RANK": "4"}, r"^RANK is 4, and WORLD_SIZE 4; ranks are 0 to 3$"),
    ({**TORCHRUN, "RANK": "x"}, r"^RANK is 'x'; it must be an int of 0 or more$"),
    ({**SLURM, "SLURM_PROCID": "-1"}, r"^SLURM_PROCID is '-1'; it must be an int of 0 or more$"),
    (BATCH, r"^this is the batch script of a Slurm job of 8 tasks, which runs once; start the program with srun or "),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
     r"^mpirun \(Open MPI\) started this process on one of several hosts, .* with mpirun -x MASTER_ADDR=\.\.\. and"),
    ({**MPICH, "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"}, r"does not say where rank 0 .* -genv MASTER_PORT \.\.\.$"),
])  # fmt: skip
def test_what_cannot_be_understood_says_what_it_saw_and_what_to_set(variables: Mapping[str, str], text: str) -> None:
    assert started(variables)
    with pytest.raises(RuntimeStateError, match=text):
        launch(variables)


# -- With processes ----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch, torch.distributed as dist
import partway as pw
torch.set_num_threads(1)
size = pw.init(simulate=4, backend="gloo", timeout=60)
x = torch.ones(1) * (pw.get_rank() + 1)
if dist.is_initialized():
    dist.all_reduce(x)
sys.stdout.write(f"rank {pw.get_rank()} of {pw.get_group_size()} {size} sum {x.item()}\\n")
"""
EXPECTED = ["rank 0 of 2 2 sum 3.0", "rank 1 of 2 2 sum 3.0"]


@pytest.fixture
def clean() -> dict[str, str]:
    """The environment without any launcher's variables."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "OMPI_", "PMI_", "MS_", "MPI_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        kept.pop(name, None)
    return {**kept, "OMP_NUM_THREADS": "1"}


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["slurm", pytest.param("open mpi", marks=pytest.mark.slow)])
def test_tasks_meet_by_the_variables_of_their_launcher(kind: str, clean: dict[str, str], tmp_path: Path) -> None:
    """A stand-in for the launcher: processes with its variables."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    given = {**clean, "MASTER_PORT": str(free_port())}
    every = []
    for rank in ("0", "1"):
        own = {
            "slurm": {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"},
            "open mpi": {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2",
                         "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        }[kind]  # fmt: skip
        every.append({**given, **own})
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda environment: run_script(["script.py"], tmp_path, environment), every))
    assert [process.stdout.strip() for process in ended] == EXPECTED, ended


REAL = {
    "mpirun.openmpi": ["--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpiexec.hydra": ["-n", "2"],
    "srun": ["-n", "2", "--overcommit"],
}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("program", REAL)
def test_the_launcher_itself(program: str, wrapped: bool, clean: dict[str, str], tmp_path: Path) -> None:
    """Open MPI's, MPICH's and Slurm's own, where they are installed; by way of a shell script, too."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "script.py")]
    if wrapped:
        command = ["sh", "-c", f"{' '.join(command)}; true"]
    with slurm.node(tmp_path / "slurm") if program == "srun" else nullcontext({}) as more:
        ended = subprocess.run(
            [program, *REAL[program], *command], env={**clean, **more}, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
    assert sorted(ended.stdout.split("\n"))[1:] == EXPECTED, ended


def test_a_process_that_is_ready_does_not_write_over_what_is_not_its_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "ready"
    monkeypatch.setenv("PARTWAY_READY_FILE", str(mark))
    for _ in range(2):
        tell_ready()
    assert mark.read_text() == f"partway {os.getpid()}\n"
    mark.write_text("a thesis")
    with pytest.raises(
        RuntimeStateError, match=r"PARTWAY_READY_FILE is '.*ready': it is there already, and Partway did"
    ):
        tell_ready()
    assert mark.read_text() == "a thesis"
