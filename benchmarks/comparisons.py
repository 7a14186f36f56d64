"""What it costs that ranks are compared while they train: steps with all comparisons beside steps without any.

    python benchmarks/comparisons.py [--only gpt2] [--rounds 15] [--processes 2,4]

GPT-2 (4 layers of 768, 4 texts of 128 tokens per process) and ResNet-50 (4 images of 160 pixels per process), in data
parallelism on gloo, each step with a clip of the gradients' norm and AdamW. Two copies of a model take turns. For one
of them every rank writes into its ledgers, whose threads compare them and look for stragglers; for the other nothing is
written, and `compare_replicas` is False. Counted are the CPU seconds of all threads of all ranks, and the seconds of
the clock. Ratios are those of two steps in a row, with their quartiles; the bar is BAR.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import free_port, start
from torch.multiprocessing.spawn import spawn

import partway as pw
from partway.measure.workloads import Workload, gpt2, resnet50
from partway.runtime.ranks.ledger import Ledger
from partway.runtime.ranks.watch import watch

BAR, WARM = 1.01, 2
WORKS = {"gpt2": lambda: gpt2(4, 128), "resnet50": lambda: resnet50(160)}
_LINES = ("ran", "given", "came_back", "stepped", "settings", "writes", "holds", "shared")  # what a ledger is told


def main(
    only: Annotated[str, typer.Option(help="of the models")] = "",
    rounds: Annotated[int, typer.Option(help="steps with, and as many without")] = 15,
    processes: Annotated[str, typer.Option(help="numbers of them")] = "2,4",
) -> None:
    """Measure."""
    table = Table("case", "ms with", "ms without", "CPU ms with", "clock", "CPU", box=SIMPLE_HEAD)
    console, missed = Console(width=130), False
    for name in (name for name in WORKS if only in name):
        for size in map(int, processes.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                spawn(_rank, (size, free_port(), name, rounds, folder), nprocs=size)
                seconds = torch.load(Path(folder) / "seconds")  # of a round, then with and without, then clock and CPU
            ratios = [[on[k] / off[k] for on, off in seconds] for k in (0, 1)]
            clock, cpu, without = (
                1e3 * statistics.median(pair[i][k] for pair in seconds) for i, k in ((0, 0), (0, 1), (1, 0))
            )
            shown = [f"{q[1]:.3f} ({q[0]:.3f} to {q[2]:.3f})" for q in (statistics.quantiles(r, n=4) for r in ratios)]
            table.add_row(f"{name}, {size} processes", f"{clock:.0f}", f"{without:.0f}", f"{cpu:.0f}", *shown)
            missed |= any(statistics.median(r) > BAR for r in ratios)
    console.print(table)
    raise typer.Exit(missed)


def _rank(rank: int, size: int, port: int, name: str, rounds: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    pw.init(backend="gloo")
    work = WORKS[name]()
    steps = [_step(work, size, compared) for compared in (True, False)]
    seconds = []
    for _ in range(WARM + rounds):
        on = _timed(steps[0])
        with _silent():
            off = _timed(steps[1])
        seconds.append((on, off))
    if rank == 0:
        torch.save(seconds[WARM:], Path(folder) / "seconds")
    pw.shutdown()


def _step(work: Workload, size: int, compared: bool) -> Callable[[], None]:
    with pw.auto_parallel_context(parallel_mode="data_parallel", full_batch=True, compare_replicas=compared):
        model = pw.shard(work.model(torch.float32), mesh={"dp": size})
        batch = work.tensors(work.each * size, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> None:
            model(*batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        with _silent() if not compared else _as_it_is():
            step()
    return step


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the clock, the longest of any rank, and of the CPUs, those of all ranks."""
    dist.barrier()
    clock, cpu = time.perf_counter(), time.process_time()
    step()
    found = torch.tensor([time.perf_counter() - clock, time.process_time() - cpu], dtype=torch.float64)
    longest, total = found.clone(), found.clone()
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return longest[0].item(), total[1].item()


@contextmanager
def _silent() -> Iterator[None]:
    """No ledger is told anything."""
    own: Any = watch()
    kept = {name: getattr(Ledger, name) for name in _LINES}, {n: getattr(own, n) for n in _LINES if hasattr(own, n)}
    every, own.look_every = own.look_every, None
    for target, names in ((Ledger, kept[0]), (own, kept[1])):
        for name in names:
            setattr(target, name, lambda *_: None)
    try:
        yield
    finally:
        for target, names in ((Ledger, kept[0]), (own, kept[1])):
            for name, value in names.items():
                setattr(target, name, value)
        own.look_every = every


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


if __name__ == "__main__":
    start(main)
