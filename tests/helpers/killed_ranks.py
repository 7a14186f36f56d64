"""Ranks that train and save in a loop until they are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from scripts import FORKS

import partway as pw
from partway.checkpoints import ranks
from partway.runtime.ranks.watch import Watch

RANKS = 2
TIMEOUT = 60.0  # seconds that the ranks wait for each other
PATIENCE = 60.0  # seconds within which the remaining ranks have to end, with an error


def made() -> tuple[Any, torch.optim.Optimizer]:
    """A model and an optimizer, with the same values at each call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 63))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, with gradients computed from its number."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(step))
    optimizer.step()


def goes_on(model: Any, optimizer: torch.optim.Optimizer, folder: str, asynchronous: bool) -> None:
    """Load, train and save in an endless loop."""
    step = pw.load(folder, model, optimizer)["step"]
    while True:
        step += 1
        train(model, optimizer, step)
        pw.save(folder, model, optimizer, step=step, keep=2, asynchronous=asynchronous)


def killed_at(moment: float) -> Callable[[Collection[Any]], None]:
    """Kills processes `moment` seconds after they begin to save."""

    def kill(processes: Collection[Any]) -> None:
        time.sleep(moment)
        for process in processes:
            process.kill()

    return kill


def until_killed(
    folder: str, doomed: Collection[int], kill: Callable[[Collection[Any]], None], asynchronous: bool = False,
    early: str = "",
) -> dict[int, str]:  # fmt: skip
    """Let ranks train and save, and `kill` those of `doomed`. `early`: they kill themselves where rank 0 is about to
    report the result of a meeting ("meeting"), or where the ranks make a process group ("connecting"). Return the last
    message of each other rank. Raises AssertionError if one of them does not end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [Pipe() for _ in range(RANKS)]
    processes = [
        FORKS.Process(target=_rank, args=(theirs, rank, store.port, folder, asynchronous, early * (rank in doomed)))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        with theirs:
            process.start()
    try:
        assert [ours.recv() for ours, _ in pipes] == ["ready"] * RANKS
        kill([processes[rank] for rank in doomed])
        end = time.monotonic() + PATIENCE
        for rank, process in enumerate(processes):
            process.join(max(0.0, end - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} stays when {list(doomed)} are killed"
        assert all(processes[rank].exitcode == -signal.SIGKILL for rank in doomed)
        return {rank: pipes[rank][0].recv() for rank in range(RANKS) if rank not in doomed}
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(parent: Connection, rank: int, port: int, folder: str, asynchronous: bool, early: str) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    try:
        pw.init(backend="gloo", timeout=TIMEOUT)
        model, optimizer = made()
        model = pw.shard(model, mesh={"tp": RANKS}, parameter_plan={"*.weight": ("tp", None)})
        dist.barrier()
        parent.send("ready")
        if early == "meeting":
            Watch._judged = _ends  # type: ignore[method-assign, assignment]
        elif early == "connecting":
            ranks._group = _ends  # type: ignore[assignment]
        goes_on(model, optimizer, folder, asynchronous)
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}")


def _ends(*args: Any) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""
