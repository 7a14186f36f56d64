"""Find the launcher of this process among those that Partway knows, by the variables that it sets in the environment.

    torchrun                  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK picks the GPU
    the scheduler             MS_ROLE, MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT; MS_NODE_ID asks for a rank
    mpirun of Open MPI        OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; OMPI_COMM_WORLD_LOCAL_RANK
    mpirun of MPICH, Intel    PMI_RANK, PMI_SIZE; MPI_LOCALRANKID
    srun of Slurm             SLURM_PROCID, SLURM_STEP_NUM_TASKS; SLURM_LOCALID

The first one found counts, since one launcher may start another: srun or mpirun a torchrun on each node, srun an
mpirun. A launcher of a single process does not count: its shell may simulate. A partial environment is an error and not
a simulation, which would train a whole copy in each process of a job. Ray Train makes a process group, which is used as
it is; a trainer of Ray's that makes none sets no variable, either, so Ray itself is asked.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...strategy.basics.files import FOREIGN, is_foreign
from ...strategy.errors import RuntimeStateError
from .interfaces import place_of

SIMULATE = "PARTWAY_SIMULATE"  # the number of virtual devices: `partway run --simulate` sets it
READY = "PARTWAY_READY_FILE"  # a file that this process writes when it has joined its job
TORCHRUN, SCHEDULER = "torchrun", "the scheduler"
_REQUIRED = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    SCHEDULER: ("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT"),
}
_ALONE = {"WORLD_SIZE": "RANK", "MS_WORKER_NUM": "MS_ROLE", "MS_SCHED_HOST": "MS_ROLE", "MS_SCHED_PORT": "MS_ROLE"}
_PORTS = range(20000, 32768)  # below the ports that systems give to outgoing connections


@dataclass(frozen=True)
class _Tasks:
    """A launcher that numbers its processes and has no meeting place: its variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    on_one_host: tuple[str, str]  # these are equal where all processes are on one host
    hosts: str  # the first is that of rank 0
    job: tuple[str, ...]  # tells its jobs apart
    give: str  # how to give a variable to all processes


_TASKS = (
    _Tasks(
        "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "mpirun -x {}=",
    ),
    _Tasks(
        "mpirun (MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("PMI_SIZE", "MPI_LOCALNRANKS"),
        "", (), "mpirun -genv {} ",
    ),
    _Tasks(
        "srun (Slurm)", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        ("SLURM_STEP_NUM_NODES", ""), "SLURM_STEP_NODELIST", ("SLURM_JOB_ID", "SLURM_STEP_ID"), "export {}=",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process.

    launcher     its name
    rank, size   of the processes; the scheduler's workers get their ranks when they meet (None)
    local_rank   the position on its host; None: not known yet
    host, port   where the processes meet
    one_host     whether the launcher says that all processes are on one host
    job          tells this job from others that may meet there; "" if each job has its own meeting place
    """

    launcher: str
    rank: int | None
    size: int
    local_rank: int | None
    host: str
    port: int
    job: str = ""
    one_host: bool = False

    @property
    def where(self) -> str:
        """Where the processes meet, "host:port"."""
        return place_of(self.host, self.port)


def started(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher started this process, or some of its variables are set."""
    env = os.environ if environment is None else environment
    leads = "RANK" in env or ("MS_ROLE" in env and not _has_servers(env))
    half = _is_batch(env) or _half_of_one(env) is not None or _of_ray() is not None
    return leads or half or _tasks_in(env) is not None


def launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """What started this process; None if no launcher did. Raises RuntimeStateError for variables that are missing, are
    not numbers, or contradict each other, with the variables there are and those to set."""
    env = os.environ if environment is None else environment
    tasks = _tasks_in(env)
    if "RANK" in env and "MS_ROLE" in env and not _has_servers(env):
        raise RuntimeStateError(
            f"two launchers started this process: RANK={env['RANK']} is torchrun's, and MS_ROLE={env['MS_ROLE']} the "
            "scheduler's; unset the variables of one"
        )
    if "RANK" in env:
        return _torchrun(env, tasks)
    if "MS_ROLE" in env and not _has_servers(env):
        _require(SCHEDULER, env)
        host, port = address_in(env, "MS_SCHED_HOST"), number("MS_SCHED_PORT", 1, env)
        return Launch(SCHEDULER, None, number("MS_WORKER_NUM", 1, env), None, host, port, one_host=is_local(host))
    if tasks is not None:
        return _of_tasks(tasks, env)
    if _is_batch(env):
        raise RuntimeStateError(
            f"this is the batch script of a Slurm job of {env['SLURM_NTASKS']} tasks, which runs once; start the "
            "program with srun or torchrun there, or unset SLURM_NTASKS to simulate all devices in one process"
        )
    if name := _half_of_one(env):
        raise RuntimeStateError(
            f"{name}={env[name]} is set, but the environment has no {_ALONE[name]}, so that it is not known which of "
            f"the processes this is; start it with a launcher such as torchrun, or unset {name} to simulate all "
            "devices in one process"
        )
    if worker := _of_ray():
        raise RuntimeStateError(
            f"this is {worker} of Ray Train, whose trainer has made no process group; train with its TorchTrainer "
            "(ray.train.torch), or call torch.distributed.init_process_group in each worker"
        )
    return None


def simulated() -> int | None:
    """The number of virtual devices that the environment asks for; None if it asks for none."""
    return number(SIMULATE, 1) if SIMULATE in os.environ else None


def host_name() -> str:
    """The name of this process's host in its job. Hosts may share a name, as containers and network namespaces do, but
    not torchrun's agent: its number is part of the name."""
    return "/".join([socket.gethostname(), *filter(None, [os.environ.get("GROUP_RANK")])])


def number(name: str, least: int, environment: Mapping[str, str] | None = None) -> int:
    """A variable as a number. Raises RuntimeStateError if it is not one, or less than `least`."""
    text = (os.environ if environment is None else environment)[name]
    if not text.isdecimal() or int(text) < least:
        raise RuntimeStateError(f"{name} is {text!r}; it must be an int of {least} or more")
    return int(text)


def address_in(env: Mapping[str, str], name: str) -> str:
    """A variable as a host's name or address; an IPv6 address may have brackets."""
    return env.get(name, "").removeprefix("[").removesuffix("]")


def _torchrun(env: Mapping[str, str], tasks: _Tasks | None) -> Launch:
    _require(TORCHRUN, env)
    rank, size = number("RANK", 0, env), number("WORLD_SIZE", 1, env)
    if rank >= size:
        raise RuntimeStateError(f"RANK is {rank}, and WORLD_SIZE {size}; ranks are 0 to {size - 1}")
    by_hand = "TORCHELASTIC_RUN_ID" not in env  # another launcher may start torchrun itself, once a node
    if by_hand and tasks is not None and (env[tasks.rank], env[tasks.size]) != (env["RANK"], env["WORLD_SIZE"]):
        raise RuntimeStateError(
            f"two launchers started this process: RANK={rank} and WORLD_SIZE={size} are torchrun's, and {tasks.name} "
            f"says {tasks.rank}={env[tasks.rank]} and {tasks.size}={env[tasks.size]}; unset RANK and WORLD_SIZE, or "
            "set them alike"
        )
    local = number("LOCAL_RANK", 0, env) if "LOCAL_RANK" in env else None
    host, port, here = address_in(env, "MASTER_ADDR"), number("MASTER_PORT", 0, env), env.get("LOCAL_WORLD_SIZE")
    one_host = is_local(host) if here is None else here == env["WORLD_SIZE"]
    return Launch(TORCHRUN, rank, size, local, host, port, one_host=one_host)


def _of_tasks(kind: _Tasks, env: Mapping[str, str]) -> Launch:
    rank, size = number(kind.rank, 0, env), number(kind.size, 1, env)
    all_here, here = kind.on_one_host
    one_host = env.get(all_here) == (env.get(here) if here else "1")
    job = "/".join(env[name] for name in kind.job if name in env)
    host = address_in(env, "MASTER_ADDR") or ("127.0.0.1" if one_host else first_host(env.get(kind.hosts, "")))
    if not host or not (job or one_host or "MASTER_PORT" in env):
        raise RuntimeStateError(
            f"{kind.name} started this process on one of several hosts, and does not say where rank 0 is; give all "
            f"processes its address and a port, with {kind.give.format('MASTER_ADDR')}... and "
            f"{kind.give.format('MASTER_PORT')}..."
        )
    job = job or _parent_of_session()
    port = number("MASTER_PORT", 1, env) if "MASTER_PORT" in env else _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
    local = number(kind.local_rank, 0, env) if kind.local_rank in env else None
    return Launch(kind.name, rank, size, local, host, port, job, one_host)


def _has_servers(env: Mapping[str, str]) -> bool:
    """Return whether MS_ROLE belongs to a parameter server, whose workers are not ranks of one program."""
    return env.get("MS_SERVER_NUM", "0") != "0"


def is_local(host: str) -> bool:
    """Return whether a name or an address is of the loopback."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _parent_of_session() -> str:
    """The parent of this process's session: a launcher's process on this host, if each task is a session of its own."""
    try:
        status = Path(f"/proc/{os.getsid(0)}/stat").read_text()
    except OSError:
        return str(os.getppid())
    return status.rpartition(")")[2].split()[1]


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts, such as "node[07-09,12],login1"."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts).split(",")[0]


def _tasks_in(env: Mapping[str, str]) -> _Tasks | None:
    """The launcher that started this process as one of several tasks; None if there is none."""
    here = () if _by_ray(env) else _TASKS
    return next((kind for kind in here if kind.rank in env and env.get(kind.size, "1") != "1"), None)


def _half_of_one(env: Mapping[str, str]) -> str | None:
    """A variable that means nothing without another, if it is set alone; a WORLD_SIZE of 1 asks for nothing."""
    of_servers = _has_servers(env)
    names = [name for name in _ALONE if name in env and not (of_servers and name.startswith("MS_"))]
    return next((name for name in names if name != "WORLD_SIZE" or env[name] != "1"), None)


def _is_batch(env: Mapping[str, str]) -> bool:
    """Return whether this is a batch script of Slurm, which starts the tasks of its job but is none."""
    return (
        env.get("SLURM_NTASKS", "1") != "1"
        and "SLURM_PROCID" in env  # a shell of salloc has no SLURM_PROCID
        and "SLURM_STEP_NUM_TASKS" not in env
        and not _by_ray(env)
    )


def tell_ready() -> None:
    """Write the file that PARTWAY_READY_FILE names, if it is set: this process has joined its job. Kubernetes' probes,
    for example, look for it. Raises RuntimeStateError, also if another file is there."""
    if path := os.environ.get(READY):
        try:
            if is_foreign("the mark", path):
                raise RuntimeStateError(f"{READY} is {path!r}: {FOREIGN}")
            Path(path).write_text(f"partway {os.getpid()}\n", encoding="utf-8")
        except OSError as error:
            raise RuntimeStateError(f"{READY} is {path!r}, which cannot be written: {error.strerror}") from error


def _by_ray(env: Mapping[str, str]) -> bool:
    """Return whether a node of Ray started this process: variables of srun or mpirun then describe the node, not its
    workers."""
    return env.get("RAY_RAYLET_PID") == str(os.getppid())


def _of_ray() -> str | None:
    """Describe this process as one of several workers of Ray Train; None if it is not."""
    train = sys.modules.get("ray.train")  # a worker has imported it
    try:
        context = train.get_context() if train is not None else None
        rank, size = (context.get_world_rank(), context.get_world_size()) if context is not None else (0, 1)
    except (AttributeError, RuntimeError):  # Ray Train did not start this process
        return None
    return None if size == 1 else f"worker {rank} of {size}"


def _require(launcher: str, env: Mapping[str, str]) -> None:
    first, *_ = names = _REQUIRED[launcher]
    missing = [name for name in names if name not in env]
    if missing:
        raise RuntimeStateError(
            f"{launcher} started this process, as {first}={env[first]} says, but the environment has no "
            f"{', '.join(missing)}; set what is missing, or unset {first} to simulate all devices in one process"
        )
