"""How well predicted steps agree with measured ones, on gloo processes of this machine.

    python benchmarks/calibration.py [--world 2 --world 4] [--only TEXT] [--steps 9] [--full] [--json FILE]
    python benchmarks/calibration.py --world 1 --device cuda [--times 8]

Calibrates this machine with as many processes (`partway calibrate --quick`; with `--full` all of it), then runs MLP,
GPT-2, Llama, ViT, ResNet-50 and a U-Net, split by the batch, by weights, by both and by the height of images. All live
in the same processes and take turns, two steps each, of which the second one counts. Predicted is the end of the
forward and the backward with all that overlaps (`program.schedule`), measured the median of the steps of the slowest
rank, and "alone" what was predicted with nothing overlapped. The second table says of each kind of operator and
collective what it was predicted to take, and what it took on rank 0, over all steps. Nothing else should run meanwhile.

A machine that is shared is now faster and now slower than it was when it was calibrated. So some matrix products are
timed before and after the calibration (with `--profile`: at the start), and before each turn; by how much longer they
took beside the steps is printed.

On a GPU (`--device cuda`, a GPU for each process) batches may be larger by a factor, so that not only Python is timed.

Bars: the median of predicted over measured within 10 % of 1, and nine of ten within 15 %.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import typer
from calibration_cases import WORKLOADS, Case, cases
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

import partway as pw
from partway.measure.calibrate import calibrate, threads_of
from partway.measure.clock import wait_for
from partway.propagation.program.timeline import COMMUNICATION
from partway.runtime.code.recorders import record_timeline
from partway.runtime.launching.gpus import take_of

WARM, TIMED = 2, 3  # steps before those that are measured, and steps of which every operator is timed
MEDIAN_BAR, MOST_BAR, MOST = 0.10, 0.15, 0.9
SHOWN = 25  # kinds of operators
PRODUCT, AT_ONCE, PRODUCTS = 640, 10, 12  # what tells the machine's speed: rows, at once, and before a calibration


def run(
    rank: int, ranks: int, device: str, times: int, profile: str, steps: int, chosen: list[Case], folder: str
) -> None:
    """One rank of all cases; what it measured goes to a file."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # gloo tells of each group that it makes
    join(rank, ranks, device, folder)
    pw.set_auto_parallel_context(device_profile=profile)
    running = [Running(case, device, times) for case in chosen]
    for _ in range(steps):
        for one in running:
            one.turn()
    found = [one.told() for one in running]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def join(rank: int, ranks: int, device: str, folder: str) -> None:
    """Be one of `ranks` processes."""
    torch.set_num_threads(threads_of(ranks))
    if device == "cuda":
        take_of(rank, ranks)
    backend, store = "nccl" if device == "cuda" else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)


class Running:
    """One case on this rank, with batches larger by a factor `times`."""

    def __init__(self, case: Case, device: str, times: int) -> None:
        self.case, self.device, work = case, device, WORKLOADS[case.model]()
        parts = case.arguments(work)["mesh"].get("dp", 1) if work.own_statistics else 1
        self.options = {"batch_norm_parts": parts, "backend": case.backend}
        self.batch = work.tensors(work.each * case.ranks * times, torch.float32, device)
        self.products: list[float] = []
        self.times: list[float] = []
        with pw.auto_parallel_context(**self.options):
            self.model: Any = pw.shard(work.model(torch.float32, device), **case.arguments(work))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
            for _ in range(WARM):
                self._step()

    def _step(self) -> float:
        return step(self.model, self.batch, self.optimizer, self.device)

    def turn(self) -> None:
        """A step that counts, after one that does not: what it reads is in the caches then as in training."""
        with pw.auto_parallel_context(**self.options):
            self.products.append(product(self.device))
            self._step()
            self.times.append(self._step())

    def told(self) -> dict[str, Any]:
        """What it took, and what it was predicted to."""
        schedule = self.model.program.schedule
        kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for span in schedule.spans:
            kinds[span.args["kind"]][0] += span.seconds
        if self.case.backend == "eager":
            self._time_operators({(span.phase, span.name): kinds[span.args["kind"]] for span in schedule.spans})
        return {
            "case": self.case.name, "predicted": schedule.seconds,
            "alone": schedule.computing + schedule.communicating, "collectives": len(self.model.program.collectives),
            "measured": self.times, "kinds": dict(kinds), "product": statistics.median(self.products),
        }  # fmt: skip

    def _time_operators(self, kind_of: dict[tuple[str, str], list[float]]) -> None:
        for i in range(1 + TIMED):
            with pw.auto_parallel_context(**self.options), record_timeline() as spans:
                self._step()
            free = 0.0  # when the last collective was over: one that was issued before waits for it
            for span in sorted(spans, key=lambda span: span.start + span.seconds):
                end = span.start + span.seconds
                begin = max(span.start, free) if span.lane == COMMUNICATION else span.start
                free = end if span.lane == COMMUNICATION else free
                if i and (span.phase, span.name) in kind_of:  # in the first step the timed functions are made
                    kind = kind_of[span.phase, span.name]
                    kind[1] += (end - begin) / TIMED
                    kind[2] += 1 / TIMED


def step(model: Any, batch: tuple[Any, ...], optimizer: torch.optim.Optimizer, device: str = "cpu") -> float:
    """The seconds of a forward and a backward, which all ranks begin at once."""
    dist.barrier()
    wait_for(device)
    begin = time.perf_counter()
    model(*batch).backward()
    wait_for(device)
    seconds = time.perf_counter() - begin
    optimizer.step()
    optimizer.zero_grad()
    return seconds


def product(device: str) -> float:
    """The seconds of some matrix products, which all ranks begin at once."""
    a = torch.ones(PRODUCT, PRODUCT, device=device)
    dist.barrier()
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(AT_ONCE):
        torch.mm(a, a)
    wait_for(device)
    return time.perf_counter() - begin


def _products(rank: int, ranks: int, device: str, folder: str) -> None:
    """One rank of a machine whose speed is told; it goes to a file."""
    join(rank, ranks, device, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(statistics.median(product(device) for _ in range(PRODUCTS))))
    dist.barrier()
    dist.destroy_process_group()


def product_of(ranks: int, device: str) -> float:
    """The seconds of `product`, on average of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_products, (ranks, device, folder), nprocs=ranks)
        return statistics.fmean(json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks))


def main(
    world: Annotated[list[int], typer.Option(help="numbers of processes")] = [2, 4],  # noqa: B006 - typer takes a list
    only: Annotated[str, typer.Option(help="cases whose name contains this")] = "",
    steps: Annotated[int, typer.Option(help="steps of each case; the median counts")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    times: Annotated[int, typer.Option(help="how many times larger batches are")] = 1,
    full: Annotated[bool, typer.Option("--full", help="calibrate with all probes")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="a device profile, or a preset's name, to calibrate nothing")
    ] = None,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/calibration.json"),
) -> None:
    """Calibrate, run every case, and print the tables."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = []
    for ranks in world:
        chosen = [case for case in cases(ranks) if only in case.name]
        if not chosen:
            continue
        path = profile or out.with_name(f"profile_{ranks}.json")
        before = product_of(ranks, device)
        if profile is None:
            calibrated = calibrate(ranks, device, quick=not full)
            calibrated.profile.save(path)
            print(calibrated.report())
        before = (before + product_of(ranks, device)) / 2
        with tempfile.TemporaryDirectory() as folder:
            spawn(run, (ranks, device, times, str(path), steps, chosen, folder), nprocs=ranks)
            every = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        for parts in zip(*every, strict=True):
            taken = [max(of_ranks) for of_ranks in zip(*(part["measured"] for part in parts), strict=True)]
            figures.append({**parts[0], "measured": taken, "ratio": parts[0]["predicted"] / statistics.median(taken)})
        slower = statistics.fmean(part["product"] for rank in every for part in rank) / before
        print(
            f"beside the steps of {ranks} processes a product took {slower:.2f} of what it took beside the calibration"
        )
    console = Console(width=150)
    console.print(_steps(figures))
    console.print(_kinds(figures))
    print(_verdict([figure["ratio"] for figure in figures]))
    facts = {
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    out.write_text(json.dumps({**facts, "cases": figures}, indent=1))
    print(f"wrote {out}")


def _steps(figures: list[dict[str, Any]]) -> Table:
    table = Table(title="milliseconds of a forward and a backward")
    for column in ("case", "predicted", "alone", "collectives", "measured (least to most)", "predicted/measured"):
        table.add_column(column, no_wrap=True)
    for figure in figures:
        low, middle, high = (1e3 * f(figure["measured"]) for f in (min, statistics.median, max))
        table.add_row(
            figure["case"], f"{1e3 * figure['predicted']:.1f}", f"{1e3 * figure['alone']:.1f}",
            str(figure["collectives"]), f"{middle:.1f} ({low:.1f} to {high:.1f})", f"{figure['ratio']:.2f}",
        )  # fmt: skip
    return table


def _kinds(figures: list[dict[str, Any]]) -> Table:
    """What each kind of operator takes over all cases in which operators were timed."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for figure in figures:
        for kind, (predicted, taken, count) in figure["kinds"].items():
            if count:
                for i, more in enumerate((predicted, taken, count)):
                    sums[kind][i] += more
    table = Table(title="milliseconds of each kind, of all cases")
    for column in ("kind", "calls", "predicted", "measured", "predicted/measured"):
        table.add_column(column, no_wrap=True)
    for kind, (predicted, taken, count) in sorted(sums.items(), key=lambda item: -item[1][1])[:SHOWN]:
        table.add_row(kind, f"{count:.0f}", f"{1e3 * predicted:.1f}", f"{1e3 * taken:.1f}", f"{predicted / taken:.2f}")
    return table


def _verdict(ratios: list[float]) -> str:
    middle = statistics.median(ratios)
    near = sum(abs(ratio - 1) <= MOST_BAR for ratio in ratios)
    holds = abs(middle - 1) <= MEDIAN_BAR and near >= MOST * len(ratios)
    return (
        f"median of predicted over measured {middle:.2f} (bar: within {MEDIAN_BAR:.0%} of 1); {near} of {len(ratios)} "
        f"within {MOST_BAR:.0%} (bar: {MOST:.0%} of them): {'holds' if holds else 'misses'}"
    )


if __name__ == "__main__":
    start(main)
