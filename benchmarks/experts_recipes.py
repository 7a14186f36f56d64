"""Plans of large mixtures of experts beside the recipe by which people train them.

    python benchmarks/experts_recipes.py [--only Qwen3] [--level 0]

The cases are those of plan_time.py with mixtures: all layers, on the meta device, the batch over all devices. The
recipe is that of DeepSeek-V3's report (64 parts of the experts) and of Megatron's example for Qwen3-30B-A3B (8),
without pipelines: experts over as many neighbouring devices, and tokens exchanged there; everything else is data
parallel, with parameters at rest in parts. Only the experts are pinned, so that its figures are those of the best plan
with this recipe. Both are priced by one profile.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from plan_time import CASES, Case, inputs_of
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from script import start

from partway.compiler.meshes import meshes_to_try
from partway.compiler.passes import differentiated_program, lowered, search_on_cheapest_mesh
from partway.compiler.replan_within_memory import fitted
from partway.propagation.graph.graph import differentiated
from partway.strategy import Mesh, StrategyError

EXPERTS = ("*experts.gate_up_proj", "*experts.down_proj")
PARTS = {"Qwen3-30B-A3B": 8, "DeepSeek-V3": 64}


def recipe(case: Case) -> dict[str, Any]:
    """The split of experts: over the fewest inner axes that have as many devices as there are PARTS."""
    mesh, own = Mesh.of_sizes(case.sizes), list[str]()
    for axis in reversed(mesh.axes):
        if math.prod(mesh.size(each) for each in own) < PARTS[case.model]:
            own.insert(0, axis)
    return dict.fromkeys(EXPERTS, (tuple(own), None, None))


def figures(case: Case, plan: dict[str, Any] | None, level: int) -> tuple[float, float, float, float] | str:
    """The cost, the predicted seconds of a step, the bytes that a device sends, and those that it holds; or why there
    is no plan."""
    inputs = inputs_of(case, parameter_plan=plan, level=level)
    try:
        draft = fitted(lowered(search_on_cheapest_mesh(inputs, meshes_to_try(inputs))))
    except StrategyError as error:
        return str(error).splitlines()[0][:100]
    program = differentiated_program(inputs, draft.program, differentiated(inputs.graph)).program
    return draft.solution.cost, program.schedule.seconds, draft.plan.wire_bytes, draft.plan.memory.total


def main(
    only: Annotated[str, typer.Option(help="run the cases whose name contains this")] = "",
    level: Annotated[int, typer.Option(help="of the search")] = 0,
) -> None:
    """Print the figures of each plan over those of the recipe."""
    shown = Table("case", "plan", "cost", "step, s", "sent, GB", "held, GB", title="plans and recipes", box=SIMPLE_HEAD)
    console = Console(width=160)
    for case in (case for case in CASES if case.each and only in case.name):
        found = {
            "searched": figures(case, None, level),
            "recipe": figures(case, recipe(case), level),
        }
        for name, each in found.items():
            texts = (each, "", "", "") if isinstance(each, str) else (
                f"{each[0]:.4g}", f"{each[1]:.3f}", f"{each[2] / 1e9:.2f}", f"{each[3] / 1e9:.1f}",
            )  # fmt: skip
            shown.add_row(case.name, name, *texts)
        ours, theirs = found.values()
        if not isinstance(ours, str) and not isinstance(theirs, str):
            shown.add_row("", "searched / recipe", *(f"{a / b:.3f}" for a, b in zip(ours, theirs, strict=True)))
    console.print(shown)


if __name__ == "__main__":
    start(main)
