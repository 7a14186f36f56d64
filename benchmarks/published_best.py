"""The plan that Partway finds for the settings of published training runs, beside the layout that was published.

    python benchmarks/published_best.py [--only MPT-7b] [--cache out/published.jsonl] [--json out/published_best.json]

A setting is a model, a kind and number of GPUs, and a length of sequences; of the published rows of a setting that
published.py can express, the one with the highest MFU counts. Without `--all` there is one setting for each model and
kind of GPU.

Partway gets the model with all its layers, the sequences that all GPUs process at a time, and the memory of a GPU, and
chooses the mesh, the layout of every tensor, and what the backward computes again. Nothing is annotated. The numbers of
sequences and microbatches of a step, the formula of the MFU, and the bytes per parameter are those of the row.

Both steps are predicted with the package's prices by published_seconds.py. So the ratio of the two is that of the
layouts; beside it stands what was measured. In a microbatch of the found plan all its collectives run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from published import by_package, steps_of
from published_cache import Cache
from published_models import LanguageModel
from published_plans import by_block, columns_of
from published_rows import Run, rows
from published_seconds import Way, graph_of, optimizer_seconds
from recipes import block_of
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import start

from partway.compiler.driver import search_plan
from partway.compiler.meshes import meshes_to_try
from partway.compiler.passes import differentiated_program
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.capture.capture import capture
from partway.propagation.graph.graph import differentiated
from partway.propagation.graph.port import Role
from partway.propagation.plan.plan import Plan
from partway.propagation.program.program import Program
from partway.requests.plan_inputs import PlanInputs
from partway.requests.request import Request
from partway.strategy import StrategyError

ADAM = 8  # bytes per parameter of its two states in float32
IN_BLOCK = 1  # the block whose layouts are printed


@dataclass(frozen=True)
class Found:
    """The plan of a setting, its predicted seconds, and the CPU seconds that it took to find."""

    plan: Plan
    seconds: float
    searched: float


def settings(runs: Iterable[Run], every: bool) -> list[Run]:
    """Of each setting the row with the highest MFU; unless `every`, only of each model and kind of GPU."""
    best: dict[tuple[str, ...], Run] = {}
    for run in runs:
        if run.why_not or run.assumed:
            continue
        key = (run.model, run.kind, *((run.n_gpus, run.seq) if every else ()))
        if key not in best or mfu(run, run.measured) > mfu(best[key], best[key].measured):
            best[key] = run
    return list(best.values())


def mfu(run: Run, seconds: float) -> float:
    """The MFU of a row's step in percent, by the formula of its source."""
    return 100 * run.flops_per_token * run.tokens / seconds / run.peak_flops


def best_plan(run: Run) -> Found:
    """The plan that the search finds for a row's setting. Raises StrategyError if none fits."""
    spec, rules, prices = run.spec, run.rules, by_package(run.kind)
    assert rules is not None
    began = time.process_time()
    with torch.device("meta"):
        model = LanguageModel(spec.model, spec.sequence, getattr(torch, spec.dtype))
        tokens = torch.empty(spec.microbatch * run.ranks_of_batch, spec.sequence, dtype=torch.long)
    graph = capture(model, (), {"tokens": tokens, "labels": tokens})
    context = ParallelContext(device_num=int(run.n_gpus), gradient_fp32_sync=rules.sum32)
    states = (rules.weights + rules.masters + ADAM) / 2 - 1  # in tensors of two bytes an element
    inputs = PlanInputs(
        graph, model, Request(level=2), context, AlgoParameters(optimizer_states=states), prices.profile
    )
    draft = search_plan(inputs, meshes_to_try(inputs))
    program = by_block(differentiated_program(inputs, draft.program, differentiated(graph)).program)
    searched = time.process_time() - began
    return Found(draft.plan, _seconds(run, program), searched)


def _seconds(run: Run, program: Program) -> float:
    prices, way = by_package(run.kind), Way(run.compiled)
    phases = (graph_of(columns_of(program, module.graph), way) for module in program.phases.values())
    one = sum(phase.seconds(prices, program.mesh) for phase in phases)
    own = [port for port in program.inputs if port.port.role is Role.PARAMETER]
    held = sum(math.prod(port.local_shape) for port in own)
    return one * run.microbatches + optimizer_seconds(run, prices, held, held)


def how(plan: Plan) -> str:
    """The layouts of a block's products and weights by axis (S1: dim 1 is split, R and B: whole), and how much is
    computed again."""
    products = [o for o in plan.operators if o.operator.startswith("aten.linear") and block_of(o.module) == IN_BLOCK]
    resting = [t for t in plan.inputs if t.role is Role.PARAMETER and len(t.shape) > 1 and block_of(t.name) == IN_BLOCK]
    again = sum(o.again for o in plan.operators) / max(sum(o.seconds for o in plan.operators), 1e-30)
    ways = _counted(" times ".join(" ".join(codes) for codes in o.operands[:2]) for o in products)
    return f"{ways}; at rest {_counted(' '.join(t.codes) for t in resting)}; again {100 * again:.0f} %"


def _counted(texts: Iterable[str]) -> str:
    return ", ".join(f"{text} ({count})" for text, count in Counter(texts).items())


def main(
    only: Annotated[str, typer.Option(help="the rows whose source, model or GPU contains this")] = "",
    every: Annotated[bool, typer.Option("--all", help="all settings, not one of each model and kind of GPU")] = False,
    most: Annotated[int, typer.Option(help="the most GPUs of a setting")] = 512,
    cached: Annotated[Path, typer.Option("--cache", help="the ingredients of published.py")] = Path(
        "out/published.jsonl"
    ),
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/published_best.json"),
) -> None:
    """Search a plan for each setting, and print it beside the published layout."""
    cache, found = Cache.read(cached), list[dict[str, Any]]()
    title = "predicted steps of published layouts and of the plans found for them"
    table = Table(
        "model", "GPUs", "tokens", "published: layout", "measured s", "MFU %", "predicted s", "found: mesh", "layouts",
        "predicted s", "MFU %", "over the published layout", "CPU s", box=SIMPLE_HEAD, title=title,
    )  # fmt: skip
    for run in settings(rows(), every):
        if only not in f"{run.source} {run.model} {run.kind}" or int(run.n_gpus) > most:
            continue
        cache.plan(run.specs)
        steps, where = steps_of([run], cache), f"{run.n_gpus} {run.kind}"
        if not steps:
            continue  # the cache has printed why
        try:
            best = best_plan(run)
        except StrategyError as error:
            print(f"{run.label} on {where}: {error}")
            continue
        own, count = steps[0].predicted(by_package(run.kind)).seconds, run.spec.microbatch * run.ranks_of_batch
        reached = [mfu(run, seconds) for seconds in (run.measured, best.seconds)]
        table.add_row(
            run.model, where, f"{run.microbatches} x {count} x {run.seq}", run.layout, f"{run.measured:.3f}",
            f"{reached[0]:.1f}", f"{own:.3f}", str(best.plan.mesh), how(best.plan), f"{best.seconds:.3f}",
            f"{reached[1]:.1f}", f"{best.seconds / own:.2f}", f"{best.searched:.0f}",
        )  # fmt: skip
        found.append({
            "model": run.model, "gpu": run.kind, "gpus": int(run.n_gpus), "sequence": int(run.seq),
            "layout": run.layout, "measured": run.measured, "published": own, "mesh": str(best.plan.mesh),
            "found": best.seconds, "how": how(best.plan), "mfu": reached, "searched": best.searched,
        })  # fmt: skip
        print(f"{run.label} on {where}: {best.seconds / own:.2f}, {best.searched:.0f} CPU s", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=300).print(table)
    print(f"wrote {out}")


if __name__ == "__main__":
    start(main)
