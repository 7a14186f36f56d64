"""Published training runs beside what the package predicts for them: seconds, tokens/s, MFU and peak memory.

    python benchmarks/published.py [--only MPT-7b] [--cache out/published.jsonl] [--json out/published.json]
    python benchmarks/published.py --fit            # also fits the figures of each kind of GPU
    python benchmarks/published.py --check 3        # plans a row with all its layers, beside the extrapolation

`published_runs.csv` has some 250 runs of others with their sources. Rows that can be expressed are planned on the meta
device with few layers, by the recipe of the row (published_plans.py), and extrapolated to all layers; the ingredients
of their steps are cached, so that another profile needs no planning. Rows that cannot be expressed are listed with the
reason. Nothing is run on a device.

published_rows.py reads the rows and has the sources' formulas for MFU, published_seconds.py computes the time of a step
from its ingredients, and published_fit.py fits the physical figures of a kind of GPU to every second row of each
source. The bars, on the other rows: the median of predicted over measured seconds within 10 % of 1, nine rows of ten
within 25 %; Kendall's tau of at least 0.8 for each model with four layouts or more on a kind of GPU; memory within
10 %.

What the residuals say of the package's prices (2026-11-29):

* A roofline of the data sheet predicts 0.53 of the measured seconds (0.33 to 0.71). The sum of operations at a
  share of the peak and of bytes at a share of the bandwidth predicts 0.99 (0.89 to 1.05) on rows that were not fitted.
* Small models and short kernels need the sum, and about 1 to 2 us for each kernel.
* While collectives run, kernels reach about half to three quarters of their speed: without that, small microbatches
  (fsdp32 with two sequences) and many nodes are predicted 10 % too fast.
* Groups of gradients are copied into one buffer; presets have no price for it. Here it counts.
* Tensor parallelism over two nodes (tp16) is predicted at 0.74: collectives run at the pace of the busiest level.
* The two halves have the same sources and models. A source of which no row is fitted (`--hold`) is predicted worse:
  1.06 for Megatron-LM of 2020 and 1.13 for torchtitan, on A100; 1.45 for nanotron, whose rows alone have tensor
  parallelism on H100 80GB. What is fitted, and how, was changed after the rows to judge had been seen.
* tau is mostly that of different sequence lengths and microbatches, since these rows differ more in them than in
  layout.
* Float32 logits and their gradient, which the program does not hold, are 10 to 25 % of the memory that is printed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import typer
from published_cache import Cache
from published_fit import NAMES, SHEETS, Figures, family, fitted, halves, kendall, profile_of_sheet
from published_plans import ingredients
from published_rows import Run, rows
from published_seconds import Prediction, Prices, Step
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import start

BARS = {"median": 0.10, "nine of ten": 0.25, "tau": 0.8, "memory": 0.10}
LAYOUTS = 4  # of a model on a kind of GPU: from here on their order is judged
WORST = 10


def steps_of(runs: Iterable[Run], cache: Cache) -> list[Step]:
    """The rows whose ingredients are in the cache."""
    return [
        Step(run, *(cache.known[spec.key] for spec in run.specs))
        for run in runs
        if not run.why_not and all(spec.key in cache.known for spec in run.specs)
    ]


def by_package(kind: str) -> Prices:
    """The prices of the package: its preset for a kind of GPU, with the peak and memory of the data sheet."""
    return Prices(profile_of_sheet(SHEETS[kind]))


def fit(steps: Sequence[Step]) -> dict[str, Figures]:
    """The figures of each family of GPUs that has rows, by the rows to fit. A family with fewer rows than figures has
    those of a related one, except the share of the peak."""
    found: dict[str, Figures] = {}
    by_family: dict[str, list[Step]] = {}
    for step in steps:
        by_family.setdefault(family(step.run.kind), []).append(step)
    for name, own in sorted(by_family.items(), key=lambda item: -len(item[1])):
        like = next((figures for other, figures in found.items() if other[:4] == name[:4]), Figures())
        free = ["products"] if len(own) < len(NAMES) else FITTED
        found[name] = fitted(own, like, free)
    return found


FITTED = [name for name in NAMES if name != "nvlink_latency"]


# -- Tables ------------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    return table


def rows_table(steps: Sequence[Step], package: Mapping[int, Prediction], fits: Mapping[int, Prediction]) -> Table:
    """One line for each row."""
    names = ["measured s", "package s", "ratio"] + ["fitted s", "ratio", "exposed s"] * bool(fits)
    table = _table(
        f"predicted steps; MFU by the formula of each source; torch {torch.__version__}",
        "source", "model, layout", "GPU", "again", *names, "tokens/s/GPU", "predicted", "MFU %", "TFLOP/s", "GB",
        "predicted",
    )  # fmt: skip
    for step in steps:
        run = step.run
        best = fits.get(run.number) or package[run.number]
        cells = [
            f"{run.measured:.3f}",
            f"{package[run.number].seconds:.3f}",
            _ratio(package[run.number].seconds / run.measured),
        ]
        if fits:
            cells += [f"{best.seconds:.3f}", _ratio(best.seconds / run.measured), f"{best.exposed:.3f}"]
        rate = run.flops_per_token * run.tokens / best.seconds
        table.add_row(
            run.short, f"{run.model}, {run.layout}", run.kind, run.recompute[:18], *cells,
            f"{run.tokens / run.measured:.0f}", f"{run.tokens / best.seconds:.0f}",
            f"{100 * rate / run.peak_flops:.1f}", f"{rate / 1e12:.0f}",
            *((f"{run.memory / 1e9:.1f}", f"{step.memory / 1e9:.1f}") if run.memory else ("", "")),
        )  # fmt: skip
    return table


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def summary(title: str, steps: Sequence[Step], found: Mapping[int, Prediction]) -> Table:
    """Predicted over measured for each source and model."""
    table = _table(title, "source", "model", "GPU", "rows", "median", "5 % to 95 %", "within 25 %", "tau")
    groups: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        groups.setdefault((step.run.short, step.run.model, step.run.kind), []).append(step)
    for (source, model, kind), own in [*groups.items(), (("all", "", ""), list(steps))]:
        table.add_row(source, model, kind, *_figures(own, found), _tau(own, found) if model else "")
    return table


def _figures(steps: Sequence[Step], found: Mapping[int, Prediction]) -> tuple[str, str, str, str]:
    ratios = np.array([found[step.run.number].seconds / step.run.measured for step in steps])
    if not len(ratios):
        return "0", "", "", ""
    within = np.mean(np.abs(ratios - 1) <= BARS["nine of ten"])
    low, high = np.quantile(ratios, [0.05, 0.95])
    return str(len(ratios)), f"{np.median(ratios):.2f}", f"{low:.2f} to {high:.2f}", f"{100 * within:.0f} %"


def taus(steps: Sequence[Step], found: Mapping[int, Prediction]) -> dict[tuple[str, str], tuple[float, int]]:
    """Kendall's tau of predicted and measured tokens/s of each model with LAYOUTS or more on a kind of GPU."""
    groups: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        groups.setdefault((step.run.model, step.run.kind), []).append(step)
    return {
        key: (kendall(_pairs(own, found)), len(own))
        for key, own in groups.items()
        if len({step.run.layout for step in own}) >= LAYOUTS
    }


def _pairs(steps: Sequence[Step], found: Mapping[int, Prediction]) -> list[tuple[float, float]]:
    return [(s.run.tokens / found[s.run.number].seconds, s.run.tokens / s.run.measured) for s in steps]


def _tau(steps: Sequence[Step], found: Mapping[int, Prediction]) -> str:
    return f"{kendall(_pairs(steps, found)):.2f}" if len(steps) >= LAYOUTS else ""


def worst(steps: Sequence[Step], found: Mapping[int, Prediction]) -> Table:
    """The rows that are furthest off, with the shares of a predicted step."""
    table = _table(
        "the rows furthest off",
        "source",
        "model, layout",
        "GPU",
        "ratio",
        "measured s",
        "kernels s",
        "exposed s",
        "optimizer s",
    )
    for step in sorted(steps, key=lambda s: -abs(np.log(found[s.run.number].seconds / s.run.measured)))[:WORST]:
        each, run = found[step.run.number], step.run
        table.add_row(
            run.short, f"{run.model}, {run.layout}", run.kind, _ratio(each.seconds / run.measured),
            f"{run.measured:.3f}",
            f"{each.computing:.3f}", f"{each.exposed:.3f}", f"{each.optimizer:.3f}",
        )  # fmt: skip
    return table


def figures_table(found: Mapping[str, Figures], steps: Sequence[Step]) -> Table:
    """The fitted figures of each kind of GPU."""
    table = _table("fitted figures", "GPU", "rows", *NAMES, "nvlink GB/s", "network GB/s")
    for kind, figures in found.items():
        sheet = next(sheet for name, sheet in SHEETS.items() if family(name) == kind)
        count = sum(family(step.run.kind) == kind for step in steps)
        table.add_row(
            kind, str(count), *(f"{getattr(figures, name):.3g}" for name in NAMES),
            f"{figures.nvlink * sheet.nvlink / 1e9:.0f}", f"{figures.network * sheet.network / 1e9:.1f}",
        )  # fmt: skip
    return table


def missed(steps: Sequence[Step], found: Mapping[int, Prediction]) -> list[str]:
    """The bars that the rows miss."""
    ratios = np.array([found[step.run.number].seconds / step.run.measured for step in steps])
    memory = [abs(step.memory / step.run.memory - 1) for step in steps if step.run.memory]
    checks = {
        "median": abs(float(np.median(ratios)) - 1) <= BARS["median"],
        "nine of ten": float(np.mean(np.abs(ratios - 1) <= BARS["nine of ten"])) >= 0.9,
        "tau": all(tau >= BARS["tau"] for tau, _ in taus(steps, found).values()),
        "memory": all(error <= BARS["memory"] for error in memory),
    }
    return [name for name, held in checks.items() if not held]


def judged(steps: Sequence[Step], found: Mapping[int, Prediction]) -> list[str]:
    """The bars, each with what was found."""
    ratios = np.array([found[step.run.number].seconds / step.run.measured for step in steps])
    within = float(np.mean(np.abs(ratios - 1) <= BARS["nine of ten"]))
    orders = taus(steps, found)
    memory = np.array([step.memory / step.run.memory for step in steps if step.run.memory])
    said = [
        f"median {np.median(ratios):.3f} (bar: within {BARS['median']:.0%}), {within:.0%} of {len(ratios)} rows within "
        f"{BARS['nine of ten']:.0%} (bar: 90 %)",
        f"tau: {', '.join(f'{model} on {kind} {tau:.2f} ({n})' for (model, kind), (tau, n) in orders.items())} "
        f"(bar: {BARS['tau']})",
    ]
    if len(memory):
        near = float(np.mean(np.abs(memory - 1) <= BARS["memory"]))
        said.append(
            f"memory: median {np.median(memory):.2f}, {memory.min():.2f} to {memory.max():.2f}, "
            f"{near:.0%} of {len(memory)} "
            f"rows within {BARS['memory']:.0%}"
        )
    return said


def _unexpressed(runs: Iterable[Run], cache: Cache) -> Table:
    reasons: dict[str, Counter[str]] = {}
    for run in runs:
        failed = next((cache.failed[s.key] for s in run.specs if s.key in cache.failed), "") if not run.why_not else ""
        why = run.why_not or failed
        if why:
            reasons.setdefault(why, Counter())[f"{run.short}: {run.model}"] += 1
    table = _table("rows that cannot be expressed", "reason", "source: model (rows)", "rows")
    for why, names in reasons.items():
        for place, (name, count) in enumerate(names.items()):
            table.add_row("" if place else f"{why}: {names.total()}", name, str(count))
    return table


# -- The check of the extrapolation ------------------------------------------------------------------------------------


def check(run: Run, cache: Cache) -> str:
    """A row planned with all its layers, beside the extrapolation from few."""
    cache.plan(run.specs)
    step = Step(run, *(cache.known[spec.key] for spec in run.specs))
    prices = Figures().prices(run.kind)
    whole = ingredients(run.spec)
    every = Step(run, whole, whole, exact=True)
    exact = every.predicted(prices)
    found = step.predicted(prices)
    return (
        f"{run.label}, {run.layout}: {exact.seconds:.4f} s with all {run.spec.model.layers} layers, "
        f"{found.seconds:.4f} s extrapolated from {run.layers} ({found.seconds / exact.seconds - 1:+.2%})"
        + (f"; memory {every.memory / 1e9:.2f} and {step.memory / 1e9:.2f} GB" if run.memory else "")
    )


def main(
    only: Annotated[str, typer.Option(help="the rows whose source, model or GPU contains this")] = "",
    fits: Annotated[bool, typer.Option("--fit", help="fit the figures of each kind of GPU")] = False,
    hold: Annotated[str, typer.Option(help="fit no row of the sources whose name contains this")] = "",
    all_rows: Annotated[bool, typer.Option("--all", help="fit all rows, for figures to keep")] = False,
    planning: Annotated[bool, typer.Option("--plan/--no-plan", help="plan what the cache lacks")] = True,
    whole: Annotated[int, typer.Option("--check", help="plan this row of the file with all its layers")] = -1,
    cached: Annotated[Path, typer.Option("--cache", help="the ingredients of steps")] = Path("out/published.jsonl"),
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/published.json"),
) -> None:
    """Predict all rows, print them beside what was measured, and exit with status 1 where a bar is missed."""
    runs = [run for run in rows() if only in f"{run.source} {run.model} {run.kind}"]
    if not runs:
        raise typer.BadParameter(f"no row contains {only!r} in its source, model or GPU")
    cache = Cache.read(cached)
    if whole >= 0:
        print(check(rows()[whole], cache))
        return
    if planning:
        cache.plan(spec for run in runs if not run.why_not for spec in run.specs)
    steps = steps_of(runs, cache)
    package = {step.run.number: step.predicted(by_package(step.run.kind)) for step in steps}
    to_fit, rest = halves(steps)
    to_fit = [s for s in (*to_fit, *(rest if all_rows else ())) if not hold or hold not in s.run.source]
    figures = fit(to_fit) if fits else {}
    kinds = {step.run.kind for step in steps}
    prices = {kind: figures[family(kind)].prices(kind) for kind in kinds if family(kind) in figures}
    found = {s.run.number: s.predicted(prices[s.run.kind]) for s in steps if s.run.kind in prices}
    console = Console(width=250)
    console.print(rows_table(steps, package, found))
    console.print(_unexpressed(runs, cache))
    sure = [step for step in steps if not step.run.assumed]
    console.print(summary("the package's prices: predicted over measured", sure, package))
    best: Mapping[int, Prediction] = package
    tested: Sequence[Step] = sure
    if fits:
        tested = [step for step in rest if step.run.number in found and not all_rows]
        if hold:
            tested = [step for step in sure if hold in step.run.source and step.run.number in found]
        best = found
        console.print(figures_table(figures, to_fit))
        console.print(summary("fitted, the rows that were fitted: predicted over measured", to_fit, found))
        console.print(summary("fitted, the other rows: predicted over measured", tested, found))
        print("all rows:", *judged([*to_fit, *tested], found), sep="\n  ")
    tested = tested or sure
    console.print(worst(tested, best))
    print("the rows that are judged:", *judged(tested, best), sep="\n  ")
    out.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "torch": torch.__version__,
        "figures": {kind: asdict(each) for kind, each in figures.items()},
        "rows": [
            {"row": s.run.number, "label": s.run.label, "layout": s.run.layout, "gpu": s.run.kind,
             "assumed": s.run.assumed,
             "measured": s.run.measured, "package": asdict(package[s.run.number]),
             "fitted": asdict(found[s.run.number]) if s.run.number in found else None,
             "memory": s.memory, "measured memory": s.run.memory}
            for s in steps
        ],
        "not expressed": {run.number: run.why_not for run in runs if run.why_not},
    }  # fmt: skip
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {out}")
    failed = missed(tested, best)
    print(f"missed: {', '.join(failed)}" if failed else "all bars hold")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    start(main)
