"""Whether the plans that are predicted to be faster are faster: 12 plans of each model and the searched one, in turns.

    python benchmarks/plan_order.py [--world 2] [--model gpt2 ...] [--rounds 9] [--profile FILE] [--json FILE]

Calibrates this machine with as many processes (`partway calibrate --quick`), or takes the profile of FILE. A model is
annotated in 12 ways, from its batch alone to every weight, and once more in none, with `level=2`: that plan is what the
search chose. All of a model live in the same processes and take turns, a step each (forward and backward); a step takes
as long as on the slowest rank. Predicted is the end of the schedule (`program.schedule`). Nothing else should run
meanwhile.

Bars: Kendall's tau (b) of predicted and measured of the 12 at least 0.8, and what the search chose at most 3 % slower
than the fastest.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import typer
from calibration import step
from calibration_cases import COLUMNS, ROWS, WORKLOADS
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import Replicate
from torch.multiprocessing.spawn import spawn

import partway as pw
from partway.measure.calibrate import calibrate, threads_of
from partway.measure.workloads import Workload

MODELS = ("mlp", "gpt2", "llama", "vit")
CHOSEN = "nothing annotated, level 2"
TAU_BAR, FASTEST_BAR = 0.8, 1.03
WARM = 2
SAME = 0.02  # steps that differ by less are as fast as each other: so much they vary from run to run

Way = tuple[Mapping[str, Any], Mapping[str, Any]]  # options of the context, arguments of `shard`


def ways(model: str, work: Workload, ranks: int) -> dict[str, Way]:
    """What a person may write, by what it says: 12 ways, and that of the search alone."""
    data, whole = work.by("x"), work.by(None)
    along = tuple((None, "x", *dims[2:]) for dims in whole)
    layers = (*COLUMNS[model], *ROWS[model])
    megatron = dict.fromkeys(COLUMNS[model], ("x", None)) | dict.fromkeys(ROWS[model], (None, "x"))
    turned = {name: strategy[::-1] for name, strategy in megatron.items()}
    everywhere = {"*": [Replicate()]}
    parts = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "batch": ({}, {"in_strategy": data}),
        "data parallel": ({"parallel_mode": "data_parallel"}, {}),
        "data parallel, parameters in parts": ({"parallel_mode": "data_parallel", **parts}, {}),
        "batch, parameters whole": ({}, {"in_strategy": data, "parameter_plan": everywhere}),
        "batch, columns then rows, turned": ({}, {"in_strategy": data, "parameter_plan": turned}),
        "columns then rows": ({}, {"in_strategy": whole, "parameter_plan": megatron}),
        "columns then rows, turned": ({}, {"in_strategy": whole, "parameter_plan": turned}),
        "all by columns": ({}, {"in_strategy": whole, "parameter_plan": dict.fromkeys(layers, ("x", None))}),
        "all by rows": ({}, {"in_strategy": whole, "parameter_plan": dict.fromkeys(layers, (None, "x"))}),
        "second dim": ({}, {"in_strategy": along if model != "vit" else whole, "parameter_plan": everywhere}),
        "parameters in parts": (parts, {"in_strategy": whole}),
        "least memory": ({}, {"in_strategy": whole, "level": 1}),
        CHOSEN: ({}, {"level": 2}),
    }
    return {name: (context, {"mesh": {"x": ranks}, **given}) for name, (context, given) in options.items()}


def run(rank: int, ranks: int, profile: str, rounds: int, models: Sequence[str], folder: str) -> None:
    """One rank of all models; what it measured goes to a file."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # gloo tells of each group that it makes
    torch.set_num_threads(threads_of(ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    pw.set_auto_parallel_context(device_profile=profile)
    found = {model: _measured(model, ranks, rounds) for model in models}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measured(model: str, ranks: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Of each way of one model what it was predicted to take, what it sends, and what it took on this rank."""
    work = WORKLOADS[model]()
    batch = work.tensors(work.each * ranks, torch.float32)
    sharded: dict[str, tuple[Mapping[str, Any], Any, Any]] = {}
    for name, (context, arguments) in ways(model, work, ranks).items():
        with pw.auto_parallel_context(**context):
            module: Any = pw.shard(work.model(torch.float32), **arguments)
            module.prepare(*batch)
        sharded[name] = context, module, torch.optim.SGD(module.parameters(), lr=1e-4)
    times: dict[str, list[float]] = {name: [] for name in sharded}
    for i in range(WARM + rounds):
        for name, (context, module, optimizer) in sharded.items():
            with pw.auto_parallel_context(**context):
                taken = step(module, batch, optimizer)
            if i >= WARM:
                times[name].append(taken)
    return {
        name: {
            "predicted": module.program.schedule.seconds, "sent": module.plan.wire_bytes, "measured": times[name],
        }
        for name, (_, module, _) in sharded.items()
    }  # fmt: skip


def tau_b(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau, with ties (M. G. Kendall, "The treatment of ties in ranking problems", 1945)."""
    agree, ties = 0, [0, 0]
    pairs = list(itertools.combinations(range(len(predicted)), 2))
    for i, j in pairs:
        signs = [_sign(times[i], times[j]) for times in (predicted, measured)]
        agree += signs[0] * signs[1]
        for which, sign in enumerate(signs):
            ties[which] += sign == 0
    below = math.sqrt((len(pairs) - ties[0]) * (len(pairs) - ties[1]))
    return agree / below if below else 1.0


def _sign(one: float, other: float) -> int:
    return 0 if abs(one - other) <= SAME * min(one, other) else 1 if one > other else -1


def main(
    world: Annotated[int, typer.Option(help="number of processes")] = 2,
    model: Annotated[list[str], typer.Option(help="models")] = list(MODELS),  # noqa: B006 - typer takes a list
    rounds: Annotated[int, typer.Option(help="steps of each plan; the median counts")] = 9,
    profile: Annotated[Path | None, typer.Option(help="a device profile in place of a calibration")] = None,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/plan_order.json"),
) -> None:
    """Calibrate, run all plans, and print a table for each model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = profile or out.with_name(f"profile_{world}.json")
    if profile is None:
        calibrate(world, quick=True).profile.save(path)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (world, str(path), rounds, model, folder), nprocs=world)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    console, figures = Console(width=140), dict[str, Any]()
    for name in model:
        rows = {}
        for way, row in ranks[0][name].items():
            steps = zip(*(rank[name][way]["measured"] for rank in ranks), strict=True)
            rows[way] = {**row, "measured": [max(of_ranks) for of_ranks in steps]}
        medians = {way: statistics.median(row["measured"]) for way, row in rows.items()}
        annotated = [way for way in rows if way != CHOSEN]
        tau = tau_b([rows[way]["predicted"] for way in annotated], [medians[way] for way in annotated])
        over = medians[CHOSEN] / min(medians.values())
        console.print(_table(name, rows, medians))
        verdicts = ("holds" if tau >= TAU_BAR else "misses", "holds" if over <= FASTEST_BAR else "misses")
        print(
            f"{name}: tau {tau:.2f} (bar {TAU_BAR}: {verdicts[0]}); what the search chose takes {over:.3f} of the "
            f"fastest (bar {FASTEST_BAR}: {verdicts[1]})"
        )
        figures[name] = {"plans": rows, "tau": tau, "chosen_over_fastest": over}
    out.write_text(json.dumps(figures, indent=1))
    print(f"wrote {out}")


def _table(name: str, rows: Mapping[str, Any], medians: Mapping[str, float]) -> Table:
    table = Table(title=f"{name}: milliseconds of a forward and a backward, the fastest first")
    for column in ("annotated", "predicted", "measured (least to most)", "predicted/measured", "sent, MB"):
        table.add_column(column, no_wrap=True)
    for way in sorted(rows, key=medians.__getitem__):
        row, low, high = rows[way], min(rows[way]["measured"]), max(rows[way]["measured"])
        table.add_row(
            way, f"{1e3 * row['predicted']:.1f}", f"{1e3 * medians[way]:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})",
            f"{row['predicted'] / medians[way]:.2f}", f"{row['sent'] / 1e6:.1f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    start(main)
