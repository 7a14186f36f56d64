"""Published runs with pipelines: the step that the cuts and schedules of propagation/pipeline/ predict, beside what was
measured.

    python benchmarks/published_pipelines.py [--fit] [--only nanotron] [--cache FILE] [--json FILE]

A row is planned as published.py plans it, without its axis of stages; two programs with few layers give the seconds of
a layer and those of the embedding and the output layer. These are the pieces of its pipeline, which is cut where 1F1B
takes least (nanotron cuts by cost; Megatron-LM's layers are cut equally) and played with its microbatches. To it come
the gradients of the largest stage, reduced after the last microbatch, and its share of the optimizer. With --fit the
prices are those that fit all rows without stages; none with stages is fitted.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from published import by_package, fit, steps_of
from published_cache import Cache
from published_fit import family
from published_rows import Run, rows
from published_seconds import Graph, Prices, Step, optimizer_seconds
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import start

from partway.propagation.pipeline.actions import PipelineSchedule, Stages
from partway.propagation.pipeline.orders import one_forward_one_backward
from partway.propagation.pipeline.play import Times, played
from partway.propagation.pipeline.stages import ModelPiece, best_partition, times_of

ITEM = 2  # bytes of an element that goes from stage to stage


@dataclass(frozen=True)
class Predicted:
    """A row with the seconds of its step: those of the pipeline, its bubble, gradients and the optimizer."""

    run: Run
    pipeline: float
    bubble: float
    gradients: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Those of the whole step."""
        return self.pipeline + self.gradients + self.optimizer

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seconds / self.run.measured


def without_stages(run: Run) -> Run:
    """The row as if all its layers were on the ranks of one stage."""
    return replace(run, values={**run.values, "pp": "1", "vpp": ""})


def predicted(run: Run, step: Step, prices: Prices) -> Predicted:
    """The step of a row with stages, from the ingredients of one without."""
    spec, mesh, count = step.run.spec, step.run.spec.mesh, step.run.microbatches
    stages = Stages(run.count("pp"), run.count("vpp"))

    def each(graphs: tuple[tuple[Graph, ...], ...]) -> tuple[tuple[float, float], ...]:
        """The forward and the backward, of one layer and of the rest."""
        few, more = ([graph.seconds(prices, mesh) for graph in phases] for phases in graphs)
        first, second = step.run.layers
        layers = [(b - a) / (second - first) for a, b in zip(few, more, strict=True)]
        return tuple((layer, max(a - first * layer, 0.0)) for layer, a in zip(layers, few, strict=True))

    last = each(tuple(program.phases for program in step.programs))
    (forward, ahead), (backward, behind) = each(tuple(p.others or p.phases for p in step.programs))
    sent = point_to_point(run, prices)
    layer, head = ModelPiece(forward, backward, 0.0, sent), ModelPiece(ahead, behind, 0.0, sent)
    pieces = [layer] * spec.model.layers + [head]

    def order(_: Times) -> PipelineSchedule:
        return one_forward_one_backward(stages, count)

    if run.source.startswith("nanotron"):
        pipeline = best_partition(pieces, stages, count, order, lambda s: stages.devices - s).played
    else:
        starts = tuple(spec.model.layers * stage // stages.stages for stage in range(stages.stages))
        times = times_of(pieces, starts)
        pipeline = played(order(times), times)
    share = 1 / stages.devices
    reduced = (sum(layer for layer, _ in last) - forward - backward) * spec.model.layers
    optimizer = optimizer_seconds(step.run, prices, step.parameters * share, step.gradients * share)
    return Predicted(run, pipeline.seconds, pipeline.bubble, max(reduced, 0.0) * share, optimizer)


def point_to_point(run: Run, prices: Prices) -> float:
    """The seconds in which a microbatch goes to the next stage, whose devices are on other nodes if all of a stage and
    the next are not on one."""
    spec = run.spec
    own = spec.dp * spec.fsdp * spec.tp
    levels = prices.profile.levels
    level = next((each for each in levels if each.devices is None or 2 * own <= each.devices), levels[-1])
    parts = spec.tp if spec.sequence_parallel else 1
    size = spec.microbatch * spec.sequence * spec.model.hidden * ITEM / parts
    return level.latency.all_to_all + size / level.bandwidth.all_to_all


def main(
    fits: Annotated[bool, typer.Option("--fit", help="fit the figures of GPUs by the rows without stages")] = False,
    only: Annotated[str, typer.Option(help="the rows whose source or model contains this")] = "",
    cached: Annotated[Path, typer.Option("--cache", help="the ingredients of steps")] = Path("out/published.jsonl"),
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/pipelines.json"),
) -> None:
    """Predict all rows with pipelines that can be expressed, and print them beside what was measured."""
    runs = [(run, without_stages(run)) for run in rows() if run.count("pp") > 1 and only in f"{run.source} {run.model}"]
    able = [(run, plain) for run, plain in runs if not plain.why_not]
    if not able:
        raise typer.BadParameter(f"no row with a pipeline that can be expressed contains {only!r}")
    cache = Cache.read(cached)
    cache.plan(spec for _, plain in able for spec in plain.specs)
    others = [run for run in rows() if not run.why_not] if fits else []
    cache.plan(spec for run in others for spec in run.specs)
    figures = fit(steps_of(others, cache)) if fits else {}

    def prices(kind: str) -> Prices:
        return figures[family(kind)].prices(kind) if family(kind) in figures else by_package(kind)

    found = [
        predicted(run, Step(plain, *(cache.known[spec.key] for spec in plain.specs)), prices(run.kind))
        for run, plain in able
        if all(spec.key in cache.known for spec in plain.specs)
    ]
    table = Table("row", "layout", "measured, s", "predicted", "bubble", "ratio", box=SIMPLE_HEAD)
    for each in found:
        texts = (f"{each.run.measured:.3f}", f"{each.seconds:.3f}", f"{each.bubble:.3f}", f"{each.ratio:.2f}")
        table.add_row(each.run.label, f"{each.run.layout} x{each.run.spec.microbatch}", *texts)
    console = Console(width=170)
    console.print(table)
    ratios = sorted(each.ratio for each in found)
    within = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
    console.print(f"{len(ratios)} rows: median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}, "
                  f"{within} within 25 %; {len(runs) - len(able)} not expressed: "
                  + ", ".join(sorted({plain.why_not for _, plain in runs if plain.why_not})))  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    rows_of = [{"row": e.run.number, "label": e.run.label, "layout": e.run.layout, "measured": e.run.measured,
                "predicted": e.seconds, "bubble": e.bubble} for e in found]  # fmt: skip
    out.write_text(json.dumps(rows_of, indent=1) + "\n")


if __name__ == "__main__":
    start(main)
