"""Whether the plans that are predicted to be faster are faster: 12 plans of each model and the searched one, in turns.

    python benchmarks/plan_order.py [--world 2] [--model gpt2 ...] [--rounds 15] [--profile FILE] [--json FILE]

Calibrates this machine with as many processes (`partway calibrate --quick`), or takes the profile of FILE. A model is
annotated in 12 ways, from its batch alone to every weight, and once more in none, with `level=2`: that plan is what the
search chose. All of a model live in the same processes and take turns, in another order each round: two steps each
(forward and backward), of which the second one counts. A step takes as long as on the slowest rank. Predicted is the
end of the schedule (`program.schedule`). Nothing else should run meanwhile.

Two plans are compared by the ratios of their steps in the same rounds: the median counts, and says that they are as
fast as each other where it is closer to 1 than it is certain to, by the quartiles of the ratios (McGill, Tukey &
Larsen, "Variations of Box Plots", 1978), or closer than 2 %.

Beside tau stand the pairs that differ in what is predicted and in what was measured, and the tau of two halves of the
rounds: no prediction agrees with times much better than they agree with each other.

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
from random import Random
from typing import Annotated, Any

from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
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
CHOSEN = "as searched, level 2"
TAU_BAR, FASTEST_BAR = 0.8, 1.03
WARM = 1
NOTCH = 1.58  # ranges between quartiles, over the root of how many there are: how far a median is certain
SAME = 0.02  # steps that differ by less are as fast as each other

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
    works = {model: WORKLOADS[model]() for model in models}
    found = {name: measured(work, ranks, ways(name, work, ranks), rounds) for name, work in works.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(work: Workload, ranks: int, given: Mapping[str, Way], rounds: int) -> dict[str, dict[str, Any]]:
    """Of each way of one model what it was predicted to take, what it sends, and what it took on this rank."""
    batch = work.tensors(work.each * ranks, torch.float32)
    sharded: dict[str, tuple[Mapping[str, Any], Any, Any]] = {}
    for name, (context, arguments) in given.items():
        with pw.auto_parallel_context(**context):
            module: Any = pw.shard(work.model(torch.float32), **arguments)
            module.prepare(*batch)
        sharded[name] = context, module, torch.optim.SGD(module.parameters(), lr=1e-4)
    times: dict[str, list[float]] = {name: [] for name in sharded}
    random = Random(0)  # the same order on all ranks
    for i in range(WARM + rounds):
        for name in random.sample(list(sharded), len(sharded)):
            context, module, optimizer = sharded[name]
            with pw.auto_parallel_context(**context):
                step(module, batch, optimizer)
                taken = step(module, batch, optimizer)
            if i >= WARM:
                times[name].append(taken)
    return {
        name: {
            "predicted": module.program.schedule.seconds, "sent": module.plan.wire_bytes, "measured": times[name],
        }
        for name, (_, module, _) in sharded.items()
    }  # fmt: skip


def tau_b(signs: Sequence[tuple[int, int]]) -> float:
    """Kendall's tau, with ties (M. G. Kendall, "The treatment of ties in ranking problems", 1945), of the orders that
    each pair has by two measures."""
    untied = math.prod(sum(pair[which] != 0 for pair in signs) for which in (0, 1))
    return sum(one * other for one, other in signs) / math.sqrt(untied) if untied else 1.0


def _between_halves(measured: Sequence[Sequence[float]], many: int = 20) -> float:
    """The tau of the medians of half of the rounds and those of the other half, by halves drawn at random: how well
    what was measured predicts itself."""
    random, taus = Random(0), []
    for _ in range(many):
        rounds = random.sample(range(len(measured[0])), len(measured[0]))
        halves = rounds[::2], rounds[1::2]
        a, b = ([statistics.median(times[i] for i in half) for times in measured] for half in halves)
        pairs = itertools.combinations(range(len(measured)), 2)
        taus.append(tau_b([(_sign(a[i] / a[j], SAME), _sign(b[i] / b[j], SAME)) for i, j in pairs]))
    return statistics.median(taus)


def order(one: Sequence[float], other: Sequence[float]) -> int:
    """1 where `one` takes longer than `other`, -1 where it takes less, 0 where nobody can tell."""
    low, middle, high = _quartiles(one, other)
    return _sign(middle, max(SAME, NOTCH * (high - low) / math.sqrt(len(one))))


def _quartiles(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Of the ratios of steps in the same rounds."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _sign(ratio: float, same: float) -> int:
    return 0 if abs(ratio - 1) <= same else 1 if ratio > 1 else -1


def main(
    world: Annotated[int, typer.Option(help="number of processes")] = 2,
    model: Annotated[list[str], typer.Option(help="models")] = list(MODELS),  # noqa: B006 - typer takes a list
    rounds: Annotated[int, typer.Option(help="steps of each plan; the median counts")] = 15,
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
        figures[name] = compared(name, [rank[name] for rank in ranks], console)
    out.write_text(json.dumps(figures, indent=1))
    print(f"wrote {out}")


def compared(name: str, ranks: Sequence[Mapping[str, Mapping[str, Any]]], console: Console) -> dict[str, Any]:
    """The plans of one model, by what each rank measured (`measured`): prints a table and whether the bars hold."""
    rows = {}
    for way, row in ranks[0].items():
        steps = zip(*(rank[way]["measured"] for rank in ranks), strict=True)
        rows[way] = {**row, "measured": [max(of_ranks) for of_ranks in steps]}
    medians = {way: statistics.median(row["measured"]) for way, row in rows.items()}
    annotated = [way for way in rows if way != CHOSEN]
    predicted, measured = ([rows[way][what] for way in annotated] for what in ("predicted", "measured"))
    signs = [
        (_sign(predicted[i] / predicted[j], SAME), order(measured[i], measured[j]))
        for i, j in itertools.combinations(range(len(annotated)), 2)
    ]
    tau, halves = tau_b(signs), _between_halves(measured)
    told = [one * other for one, other in signs if one * other]
    ratios = {way: _quartiles(rows[CHOSEN]["measured"], rows[way]["measured"]) for way in _others(rows)}
    fastest = max(ratios, key=lambda way: ratios[way][1])
    low, over, high = ratios[fastest]
    console.print(_table(name, rows, medians))
    verdicts = ("holds" if tau >= TAU_BAR else "misses", "holds" if over <= FASTEST_BAR else "misses")
    print(
        f"{name}: tau {tau:.2f} (bar {TAU_BAR}: {verdicts[0]}; {told.count(1)} of {len(told)} pairs that differ in "
        f"both agree, and two halves of the rounds have tau {halves:.2f}); what the search chose takes {over:.3f} "
        f"({low:.3f} to {high:.3f}) of {fastest!r}, the fastest of the others (bar {FASTEST_BAR}: {verdicts[1]})"
    )
    return {"plans": rows, "tau": tau, "between_halves": halves, "chosen_over_fastest": over}


def _others(rows: Mapping[str, Any]) -> list[str]:
    """The ways that do not come to what the search chose."""
    what = ("predicted", "sent")
    return [way for way, row in rows.items() if any(row[each] != rows[CHOSEN][each] for each in what)]


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
