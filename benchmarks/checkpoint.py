"""Saving and loading 2 GB of weights on two processes: Partway's checkpoints beside torch.distributed.checkpoint.

    python benchmarks/checkpoint.py [--gigabytes 2] [--processes 2] [--rounds 3]

Both save the same parts of the same split weights into a fresh folder, and load them into a model that has other
values; rounds take turns. Printed are the wall times of the slowest process, their ratio, and by how much the memory of
a process (VmHWM) grew beyond what it had before.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import partway as pw

WIDE = 4096  # a weight has 64 MB
BAR_TIME, BAR_MEMORY = 1.1, 200.0  # times DCP's; MB beyond what the process had


def memory(name: str) -> float:
    """MB: VmRSS is what the process has now, VmHWM the most that it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1e3


def forget_most() -> None:
    """Count the most from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def worker(rank: int, processes: int, layers: int, rounds: int, folder: str, found: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    pw.init(backend="gloo")
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers)))
    plan = {"*.weight": ("tp", None)}
    pw.shard(model, mesh={"tp": processes}, parameter_plan=plan)
    pw.infer_predict_layout(model, torch.ones(processes, WIDE))
    ways: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
        "partway": (lambda at: pw.save(at, model), lambda at: pw.load(at, model)),
        "DCP": (
            lambda at: dcp.save({"model": model.state_dict()}, checkpoint_id=at),
            lambda at: dcp.load({"model": model.state_dict()}, checkpoint_id=at),
        ),
    }
    for turn in range(rounds):
        for way, pair in list(ways.items())[:: 1 if turn % 2 else -1]:
            at = f"{folder}/{way}"
            for what, run in zip(("save", "load"), pair, strict=True):
                if what == "load":
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.to_local().zero_()
                dist.barrier()
                forget_most()
                before, start = memory("VmRSS"), time.perf_counter()
                run(at)
                dist.barrier()
                seconds = time.perf_counter() - start
                found.put((rank, way, what, seconds, memory("VmHWM") - before))
            if rank == 0:
                shutil.rmtree(at)
            dist.barrier()
    pw.shutdown()


def main(
    gigabytes: Annotated[float, typer.Option(min=0.1)] = 2.0,
    processes: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Compare the two, in turns."""
    layers = max(1, round(gigabytes * 1e9 / (WIDE * WIDE * 4)))
    context = mp.get_context("spawn")
    found: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=worker, args=(rank, processes, layers, rounds, folder, found))
            for rank in range(processes)
        ]
        for each in ranks:
            each.start()
        rows = [found.get(timeout=600) for _ in range(processes * rounds * 4)]
        for each in ranks:
            each.join()
    table = Table(box=SIMPLE_HEAD)
    for column in (
        "",
        "partway (s)",
        "DCP (s)",
        "ratio (range)",
        f"bar {BAR_TIME}",
        "MB more",
        "DCP's",
        f"bar {BAR_MEMORY:g}",
    ):
        table.add_column(column)
    missed = False
    for what in ("save", "load"):
        times = {way: [s for r, w, t, s, _ in rows if (r, w, t) == (0, way, what)] for way in ("partway", "DCP")}
        most = {way: max(m for _, w, t, _, m in rows if (w, t) == (way, what)) for way in ("partway", "DCP")}
        ratios = sorted(a / b for a, b in zip(times["partway"], times["DCP"], strict=True))
        holds = statistics.median(ratios) <= BAR_TIME, most["partway"] <= BAR_MEMORY
        missed |= not all(holds)
        table.add_row(
            what, *(f"{statistics.median(times[way]):.2f}" for way in ("partway", "DCP")),
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})", "holds" if holds[0] else "missed",
            f"{most['partway']:.0f}", f"{most['DCP']:.0f}", "holds" if holds[1] else "missed",
        )  # fmt: skip
    Console(width=110).print(table)
    raise typer.Exit(int(missed))


if __name__ == "__main__":
    typer.run(main)
