"""What a call and a plan cost in two installs of Partway, in one run: is the new one slower?

    python benchmarks/before_after.py --before OLD/.venv/bin/python [--only TEXT] [--rounds 15]

The new one is that of the interpreter that runs this. Without `--before` it is compared with itself, which shows how
noisy the machine is. A case is one of

    call, mlp, simulated        CPU time of forward, backward and zero_grad of a small model, of which most is what
                                stands around its operators: on one simulated device, or in one gloo process ("one
                                process"). Both installs have a process each, and take turns
    step, mlp, one process      the same with a clip of the gradients' norm and an optimizer's step (AdamW), in a gloo
                                process, where parameters, gradients and states lie split
    plan, gpt2                  CPU time of planning a model's first call, cold but for what Python imports: every plan
                                is made in a process of its own, after one of a single layer, old and new in turn

Printed are the medians with their range, and the ratios of the rounds with their quartiles; above `BAR` a case fails,
and with it the command (exit status 1). Both interpreters run this file, so it uses only what both versions have.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

BAR = 1.05  # times: what the new install may take of the old one's time
ROUND = 0.1  # CPU seconds: a round has as many calls as take at least that


@dataclass(frozen=True)
class Case:
    kind: str
    model: str
    how: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.kind, self.model, self.how)))


CASES = (
    *(Case("call", model, how) for how in ("simulated", "one process") for model in ("mlp", "gpt2", "resnet50")),
    *(Case("step", model, "one process") for model in ("mlp", "gpt2", "resnet50")),
    *(Case("plan", model) for model in ("mlp", "gpt2", "resnet50")),
)

app = typer.Typer(add_completion=False)


# -- In the interpreter of one install ---------------------------------------------------------------------------------


def workload(model: str, layers: int = 2) -> Any:
    """A small model with its batch. (Installs from before `partway.measure` have it in `partway.workloads`.)"""
    try:
        from partway.measure.workloads import mlp, tiny
    except ImportError:
        from partway.workloads import mlp, tiny
    return mlp(64, 6) if model == "mlp" else tiny(model, layers)


def calling(case: Case) -> Callable[[], float]:
    """What does a round of calls, and gives the CPU seconds of one. The model is planned, and has run."""
    import torch
    import torch.distributed as dist

    import partway as pw

    torch.set_num_threads(1)
    if case.how == "one process":
        folder = tempfile.mkdtemp()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    work = workload(case.model)
    model: Any = pw.shard(work.model(torch.float32), mesh={"dp": 1})
    batch = work.tensors(4, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters()) if case.kind == "step" else None

    def run() -> float:
        start, calls = time.process_time(), 0
        while time.process_time() < start + ROUND:
            for _ in range(10):
                model(*batch).backward()
                if optimizer is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                model.zero_grad()
            calls += 10
        return (time.process_time() - start) / calls

    run()
    return run


def planned(case: Case) -> float:
    """The CPU seconds of planning one call, and of making its program."""
    import torch

    import partway as pw

    mesh = {"dp": 4, "tp": 2}
    pw.compile(torch.nn.Linear(8, 8), (torch.ones(8, 8),), mesh=mesh)  # imports what one version has imported before
    work = workload(case.model, layers=4)
    model, batch = work.model(torch.float32), work.tensors(32, torch.float32)
    start = time.process_time()
    given = ("dp", *(None,) * (batch[0].dim() - 1))
    compiled = pw.compile(model, batch, mesh=mesh, in_strategy=(given,))
    assert compiled.program.collectives
    return time.process_time() - start


def serve(case: Case) -> None:
    """Answer each line that comes with the seconds of one more round of `case`."""
    answers = os.fdopen(os.dup(1), "w")  # gloo talks on standard output
    os.dup2(2, 1)
    run = calling(case) if case.kind != "plan" else lambda: planned(case)
    for _ in sys.stdin:
        print(run(), file=answers, flush=True)


# -- Both in turn ------------------------------------------------------------------------------------------------------


@contextmanager
def started(python: Path, case: Case) -> Iterator[Callable[[], float]]:
    """A worker of `case` under the interpreter `python`: what asks it for one more round."""
    environment = os.environ | {"PARTWAY_CACHE": "0"}
    command = [str(python), __file__, "--serve", case.name]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask() -> float:
            asked.write("\n")
            asked.flush()
            answer = answers.readline()
            if not answer:
                said.seek(0)
                raise RuntimeError(f"{' '.join(command)} ended: {said.read()[-2000:]}")
            return float(answer)

        yield ask
        asked.close()


def once(python: Path, case: Case) -> float:
    """The seconds of a round in a process of its own."""
    with started(python, case) as ask:
        return ask()


def measured(case: Case, pythons: Mapping[str, Path], rounds: int) -> dict[str, list[float]]:
    """The seconds of each install in each round; the one that begins alternates."""
    found: dict[str, list[float]] = {name: [] for name in pythons}
    (before, old), (after, new) = pythons.items()

    def in_turn(asks: Mapping[str, Callable[[], float]]) -> None:
        for i in range(rounds):
            for name in (before, after) if i % 2 else (after, before):
                found[name].append(asks[name]())

    if case.kind == "plan":
        in_turn({before: lambda: once(old, case), after: lambda: once(new, case)})
    else:
        with started(old, case) as ask_old, started(new, case) as ask_new:
            in_turn({before: ask_old, after: ask_new})
    return found


def spread(seconds: list[float]) -> str:
    """The median in ms, with the least and the most."""
    return f"{1e3 * statistics.median(seconds):.3f} ({1e3 * min(seconds):.3f}-{1e3 * max(seconds):.3f})"


@app.command()
def compare(
    before: Annotated[Path, typer.Option(help="the interpreter that has the old install")] = Path(sys.executable),
    only: Annotated[str, typer.Option(help="cases whose name contains this")] = "",
    rounds: Annotated[int, typer.Option(min=2, help="of calls; of plans a third as many")] = 15,
    served: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Compare two installs. (With --serve this process is one of the two, and runs that case.)"""
    if served:
        serve(next(case for case in CASES if case.name == served))
        return
    table = Table(box=SIMPLE_HEAD)
    for column in ("case", "before (CPU ms)", "after", "ratio (quartiles)", f"bar {BAR}"):
        table.add_column(column)
    missed = False
    for case in CASES:
        if only not in case.name:
            continue
        times = rounds if case.kind != "plan" else max(2, rounds // 3)
        found = measured(case, {"before": before, "after": Path(sys.executable)}, times)
        ratios = [new / old for old, new in zip(found["before"], found["after"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        missed |= middle > BAR
        table.add_row(
            case.name, spread(found["before"]), spread(found["after"]), f"{middle:.3f} ({low:.3f}-{high:.3f})",
            "missed" if middle > BAR else "holds",
        )  # fmt: skip
    Console(width=140).print(table)
    raise typer.Exit(int(missed))


if __name__ == "__main__":
    app()
