"""The processes that run a program: whether a launcher started them, and which of them this one is.

`launching/launchers.py` knows the launchers. Without one, a single process simulates every device. With the scheduler,
the process whose MS_ROLE is MS_SCHED runs the same script, and ends in `init` (launching/scheduler.py).
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...strategy.basics.kits import Door
from ...strategy.errors import RuntimeStateError, shown
from ...strategy.torch_mesh import has_nccl
from ..ranks.doing import first_line
from ..torch_internals import timeout_of
from . import door, gpus, scheduler, security, worker
from .job import JOB
from .launchers import SCHEDULER, TORCHRUN, Launch, launch, number, simulated, started, tell_ready

_PATIENCE = timedelta(seconds=300)  # PyTorch's default for a store
_LONGEST = 2**31 // 1000  # seconds: PyTorch counts milliseconds


def launched() -> bool:
    """Return whether this process is one of several that run the program, a rank each: a launcher started it, or there
    is a process group already."""
    return dist.is_initialized() or started()


def init(simulate: int | None = None, backend: str | None = None, timeout: float | timedelta | None = None) -> int:
    """Start the default process group if a launcher started this process, and return the number of devices.

    simulate   the number of devices if no launcher did (default 1); a launcher's world size comes first, and that of
               `partway run --simulate`, so that one script serves all
    backend    "gloo" or "nccl" (default: nccl where there is CUDA, and this process takes the GPU of its LOCAL_RANK;
               with PARTWAY_SHARE_GPU=1 ranks may share one)
    timeout    how long a rank waits for others before it raises an error, a timedelta or seconds (default: PyTorch's,
               10 minutes for nccl and 30 for gloo): for each other's start, in every collective, and to plan

    A second call changes nothing. Raises RuntimeStateError for a wrong `simulate`, `backend` or `timeout`, another
    backend or timeout than that of the group there is, a GPU that another rank has, or missing variables of the
    environment, which it names.
    """
    if simulate is not None and (not isinstance(simulate, int) or isinstance(simulate, bool) or simulate < 1):
        raise RuntimeStateError(f"simulate is {shown(simulate)}; it is a number of devices, an int of 1 or more")
    _check_backend(backend)
    limit = _read_timeout(timeout)
    Door.JOIN_SERVERS()
    if not launched():
        return simulated() or simulate or 1  # a simulation sends nothing
    if not dist.is_initialized():
        _start(backend or ("nccl" if torch.cuda.is_available() else "gloo"), limit)
        return dist.get_world_size()
    _check_that_it_is_protected()
    _warn_of_restarts()
    if backend is not None and backend != (there := "nccl" if has_nccl() else "gloo"):
        raise RuntimeStateError(
            f"the process group there is uses {there}, not {backend}; leave out backend, or call shutdown() first"
        )
    if limit is not None and limit != (waits := timeout_of(dist.group.WORLD)):
        raise RuntimeStateError(
            f"collectives of the process group there wait {waits.total_seconds():g} s, not {limit.total_seconds():g}; "
            "give the timeout where the group is made, or call shutdown() first"
        )
    return dist.get_world_size()


def get_rank() -> int:
    """The rank of this process: 0 where no launcher started it. Raises RuntimeStateError before `init`."""
    return dist.get_rank() if _ready() else 0


def get_group_size() -> int:
    """How many processes run the program. Raises RuntimeStateError before `init`.

    In simulation it is 1, however many devices are simulated: this process stands for all of them, so a data loader
    that reads the share `get_rank()` of `get_group_size()` reads the whole batch, as it has to.
    """
    return dist.get_world_size() if _ready() else 1


def get_local_rank() -> int:
    """The position of this process among those of its host, which take a GPU each: 0 if no launcher started it. Raises
    RuntimeStateError before `init`, and for an existing process group without local ranks."""
    if not _ready():
        return 0
    local = JOB.local_ranks.get(dist.group.WORLD)
    if local is None and "LOCAL_RANK" in os.environ:
        local = number("LOCAL_RANK", 0)
    if local is None:
        raise RuntimeStateError(
            "nothing says which of its host's processes this is; give each its own LOCAL_RANK, from 0"
        )
    return local


def shutdown() -> None:
    """End the default process group, and this process's part in a parameter server; does nothing if there is neither.

    Raises RuntimeStateError if what the ranks ran since the last call of a sharded function turns out to differ.
    """
    for wait in list(JOB.before_shutdown):
        wait()
    if dist.is_initialized():
        from ..ranks.watch import end_watch

        found = end_watch()
        dist.destroy_process_group()
        JOB.local_ranks.clear()
        door.shut()
        security.release()
        if found is not None:
            raise RuntimeStateError(found)


def before_shutdown(wait: Callable[[], object]) -> None:
    """Make `shutdown` call `wait` before it ends the process group, which another thread may still use."""
    JOB.before_shutdown[wait] = None


def device_type() -> str:
    """The type of device on which the ranks of the process group compute: "cuda" or "cpu"."""
    return "cuda" if has_nccl() else "cpu"


def _ready() -> bool:
    if launched() and not dist.is_initialized():
        raise RuntimeStateError("a launcher started this process, but there is no process group yet; call init() first")
    return dist.is_initialized()


def _check_backend(backend: str | None) -> None:
    if backend not in (None, "gloo", "nccl"):
        raise RuntimeStateError(f"backend is {shown(backend)}; it must be 'gloo' (CPU) or 'nccl' (CUDA)")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise RuntimeStateError("backend is 'nccl', which needs CUDA, and there is none here; use backend='gloo'")


def _read_timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return None
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout if number else math.nan
    if not 0.001 <= seconds <= _LONGEST:
        raise RuntimeStateError(
            f"timeout is {timeout!r}; it is a timedelta or a number of seconds, from 0.001 to {_LONGEST} (24 days)"
        )
    return timedelta(seconds=seconds)


def _start(backend: str, timeout: timedelta | None) -> None:
    """Join the default process group as described by the launcher's variables."""
    found = launch()
    assert found is not None
    way = security.prepare(found, backend)
    rank, local = found.rank, found.local_rank
    JOB.starts += 1
    if found.launcher == TORCHRUN:
        store = _of_torchrun(found, timeout, way)
    elif found.launcher == SCHEDULER:
        store, rank, local = meet_by_scheduler(found, timeout)
    else:
        store = meet(found, timeout, way)
    assert rank is not None
    start = dist.PrefixStore(f"start/{JOB.starts}", store)  # type: ignore[attr-defined]
    gpu = gpus.take(start, rank, local, found.one_host) if backend == "nccl" else None
    security.confirm(start, rank, found.size, way)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=found.size)
    if gpu is not None:
        dist.barrier(device_ids=[gpu])  # connects it; see `new_group` for why not by a device_id
    JOB.local_ranks.clear()
    JOB.local_ranks[dist.group.WORLD] = local
    tell_ready()


def _warn_of_restarts() -> None:
    """Warn that ranks which torchrun restarts read the values of their predecessors in its store."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and dist.group.WORLD not in JOB.local_ranks
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and dist.get_rank() == 0:
        warnings.warn(
            "torchrun starts the processes of this job again where one fails, and the process group there is would "
            "then wait for those before: call pw.init() before anything else makes a group, or set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
            stacklevel=3,
        )


def _check_that_it_is_protected() -> None:
    """Raise RuntimeStateError for an existing process group: it was made without the protection that was asked for."""
    if dist.group.WORLD in JOB.local_ranks:
        return
    asked = "set_ps_context(enable_ssl=True)" if security.wanted() else door.SECRET if door.secret() else ""
    if asked:
        raise RuntimeStateError(
            f"{asked} cannot protect the process group there, which something else has made (a call of "
            "torch.distributed.init_process_group, or Ray Train); have pw.init() make it, or leave that out"
        )


def _of_torchrun(found: Launch, timeout: timedelta | None, secured: security.Way | None) -> Any:
    """Torchrun's own store or, if the meeting of the ranks has to be protected, one that rank 0 keeps and whose address
    is in torchrun's: whoever changes that can keep the ranks apart, but no more."""
    store, own, name = _kept_by_torchrun(timeout), security.guard(), f"door/{JOB.starts}"
    if own is None and secured is None:
        return store
    if found.rank == 0:
        listener, host = _listener(found, secured), security.meeting(found.host, secured)
        store.set(name, json.dumps([host, listener.getsockname()[1]]))
        return _of_job(found, door.store_behind(listener, own))
    host, port = json.loads(store.get(name))
    return meet(replace(found, host=str(host), port=int(port)), timeout, secured)


def _listener(found: Launch, secured: security.Way | None) -> socket.socket:
    """The socket of rank 0's store. Rank 0's own name may stand for an address of its loopback, which no other host
    reaches."""
    host = (
        secured.address
        if secured is not None and secured.interface
        else found.host
        if re.fullmatch(r"[\d.]+", found.host) or ":" in found.host
        else ""
    )
    try:
        return door.listening(host, 0 if found.launcher == TORCHRUN else found.port)
    except OSError as error:
        where = f"{host or 'its addresses'}: {error.strerror or error}"
        raise RuntimeStateError(f"rank 0 cannot listen at {where}; MASTER_ADDR is an address of its host") from error


def _kept_by_torchrun(timeout: timedelta | None) -> Any:
    """The store of torchrun, which outlives the processes that it restarts, and their groups: keys have the numbers of
    both, or the next ranks would read where those of the last group listened."""
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, _, _ = next(dist.rendezvous("env://", **limit))  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"partway/{attempt}/{JOB.starts}", store)  # type: ignore[attr-defined]


def meet_by_scheduler(found: Launch, timeout: timedelta | None) -> tuple[Any, int, int]:
    """The store, the rank and the local rank of this worker. The scheduler itself ends here, after its workers."""
    role = os.environ["MS_ROLE"]
    if role == "MS_SCHED":
        scheduler.keep(found)
        raise SystemExit(0)
    if role != "MS_WORKER":
        raise RuntimeStateError(f"MS_ROLE is {role!r}; it must be MS_WORKER or MS_SCHED")
    return worker.join(found, timeout)


def meet(found: Launch, timeout: timedelta | None, secured: security.Way | None = None) -> Any:
    """A store that rank 0 keeps and the others reach. Raises RuntimeStateError if rank 0 cannot keep it, or others
    cannot reach it."""
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    keeps, own = found.rank == 0, security.guard()
    try:
        if not keeps:
            patience = (timeout or _PATIENCE).total_seconds()
            way = door.way_to(security.meeting(found.host, secured), found.port, own, patience, "rank 0")
            store = dist.TCPStore(*way, **limit)  # type: ignore[attr-defined]
        elif own is not None or secured is not None:
            store = door.store_behind(_listener(found, secured), own)
        else:
            store = dist.TCPStore(found.host, found.port, found.size, True, wait_for_workers=False, **limit)  # type: ignore[attr-defined]
    except (OSError, dist.DistError) as error:
        raise RuntimeStateError(
            f"rank {found.rank} of {found.launcher} cannot {'listen at' if keeps else 'reach rank 0 at'} {found.where};"
            " check that rank 0 runs there and that nothing else takes the port, or give all processes MASTER_ADDR and "
            f"MASTER_PORT: {first_line(error)}"
        ) from error
    return _of_job(found, store)


def _of_job(found: Launch, store: Any) -> Any:
    """A view of a store with the keys of this job alone, since others may use the store by mistake."""
    return dist.PrefixStore(f"partway/{found.job}", store)  # type: ignore[attr-defined]
