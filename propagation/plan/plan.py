"""The Plan: a strategy for every operator of a graph, the collectives that follow, and all costs.

A plan is plain data: it can be printed, queried, saved and loaded without the model it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr

from ...strategy.basics.files import save
from ...strategy.basics.kits import Door
from ...strategy.errors import StrategyError
from .alternatives import Alternatives, Origin, ScheduleSpan
from .curve import MemoryCurve
from .data import Memory, MemoryPoint, PlanData
from .explain import explain
from .load import ExpertLoad
from .plan_files import load_plan, save_plan
from .planned_graph import planned_graph
from .report import Report, summary, table

if TYPE_CHECKING:
    import networkx


class Plan(PlanData):
    """A strategy for every operator of one captured call on one mesh.

    inputs, outputs   their layouts at rest
    operators         each with its strategy, its layouts and its seconds, in the order in which they run
    collectives       each with kind, axes, group_size, payload_bytes, wire_bytes, phase, tensor, source, and the
                      strategies of its producer and consumer; the forward's first
    predicted_time    seconds of one forward, backward and optimizer's step on one device, without overlap
    memory            bytes on one device
    certificate       the search's bound, the gap to it, and whether the plan is the optimum
    """

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def of(
        self, find: Callable[[], Alternatives], schedule: Callable[[], Sequence[ScheduleSpan]] | None = None
    ) -> Self:
        """Give this plan the functions that find its alternatives and the schedule of its program, and return it."""
        self._origin = Origin(find, schedule)
        return self

    def holding(self, memory: Memory) -> Self:
        """This plan with `memory` as the memory of a device."""
        return self.model_copy(update={"memory": memory})

    def table(self, *, every: bool = False, rows: int | None = None, width: int = 180) -> Report:
        """The plan as a table: operator, strategy, layout, collectives, bytes, predicted time.

        every   also operators that send nothing and take less than 1/10,000 of the step
        rows    the most rows to show
        width   of the table, in characters
        """
        return table(self, every=every, rows=rows, width=width)

    def summary(self) -> Report:
        """Totals in three lines, and a line for each option that costs a percent or more: fully_use_devices,
        enable_algo_approxi, or another search_mode than the exact one. The first call of a new plan searches again
        without each of them."""
        known = self._origin.alternatives
        return summary(self, known.options if known else ())

    def explain(self, name: Any, *, alternatives: int = 8, loads: Sequence[ExpertLoad] = ()) -> Report:
        """Explain an operator, a module or a tensor: its strategy, its annotation with its cost, and each
        collective with its cost, its cause, and the price of the cheapest plan without it.

        `name` is an operator's name, a module's path (its operators inside), a parameter's, input's or output's
        name, an fnmatch pattern of these, or an fx.Node. Raises StrategyError, with the closest names, for others.

        Alternatives are found by searching again, for the `alternatives` costliest collectives and as many annotations;
        0: none. They need the model: a loaded plan has none.

        `loads`: what `record_expert_load` counted, to be shown at the mixtures. Raises StrategyError for those of none.
        """
        return explain(self, self._origin.alternatives, name, alternatives, loads)

    def memory_curve(self) -> MemoryCurve:
        """The cost of memory: plans under the same annotations and on the same mesh, without a limit, from the cheapest
        to the one that holds the least, each with its peak bytes on a device and the predicted seconds of a step. Each
        is the cheapest plan found at one price of a byte. `save_svg(path)` draws them, and so does a notebook.

        The plans are searched for on the first call. Raises StrategyError for a plan that was read from a file: the
        search needs the model.
        """
        known = self._origin.alternatives
        if known is None:
            raise StrategyError(
                "a plan that was read from a file has no memory curve: it is searched for, which needs the model; plan "
                "the call again"
            )
        return MemoryCurve(MemoryPoint(held=round(one.held), seconds=one.seconds) for one in known.trade_offs)

    def to_networkx(self) -> networkx.MultiDiGraph:
        """The planned graph for your own analyses with networkx: a new MultiDiGraph that may be changed.

        Nodes are `"input NAME"`, `"output NAME"`, operators by their name, and `"constant NAME"` (a value that depends
        on no input, which is not planned). Attributes of each: `kind` ("input", "output", "operator", "constant") and
        `name`; of inputs and outputs `role`, `shape`, `dtype`, `layout`, `annotation`, `seconds` (of the optimizer's
        step on a parameter); of operators `operator` ("aten.linear.default"), `result` ("float32[8, 16]"), `module`
        (its path), `source` (file, line and code), `strategy`, `factors` (by axis the factor that it splits, or None),
        `layouts` (of its results), `annotation`, `seconds` (forward and backward, without collectives), `held_bytes`
        (kept for the backward on one device), `fate` ("kept", "again", or "gone" if the backward does not read it) and
        `again` (seconds to compute it again).

        Edges lead from producer to consumer; the key is the position of the operand, 0 at an output. Attributes:
        `tensor` (its name), `result` (its number among the producer's results), `produced_as` and `read_as` (layouts:
        a code for each axis, such as `("S0", "R")`; None: of a constant), `collectives` that convert between the two,
        forward and backward, and their `wire_bytes` (that one rank sends) and `seconds`. A conversion that serves
        several readers stands at the first of them, so that the edges add up to the plan. Attributes of the graph:
        `mesh` (a dict), `wire_bytes` and `predicted_time`.

        Raises StrategyError for a plan saved by an earlier version, which lacks the operands of operators, and for an
        edited plan in which something reads a tensor that nothing produces.
        """
        return planned_graph(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; missing folders are made. Raises StrategyError if it cannot be written, or if the
        file at `path` is not a plan."""
        save_plan(self, path)

    def save_html(
        self,
        path: str | PathLike[str],
        *,
        alternatives: int = 8,
        timelines: Mapping[str, Sequence[ScheduleSpan]] | None = None,
        loads: Sequence[ExpertLoad] = (),
        title: str = "",
    ) -> None:
        """Write the plan as a page: one file that a browser opens from disk, and that fetches nothing.

        It shows the model as a graph with modules to fold; the strategy, layouts, costs, memory and source line of the
        selected node; the cause of a collective; and the costs of the step by category. `partway show` makes it from a
        saved plan.

        alternatives   for how many of the costliest collectives, and for how many annotations, to find the cost of the
                       plan without them, as `explain` does: by searching again. 0: none
        timelines      measured timelines by name, such as {"measured": spans} of record_timeline: shown below the
                       predicted one
        loads          what record_expert_load counted, a list of ExpertLoad: shown as strips of experts and devices
        title          of the page; by default the mesh

        Raises StrategyError if it cannot be written, for alternatives below 0, and for anything but a timeline.
        """
        save(
            "the page",
            path,
            Door.PLAN_PAGE(self, self._origin, alternatives, {} if timelines is None else timelines, loads, title),
        )

    def _repr_html_(self) -> str:
        return str(Door.PLAN_CELL(self))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a plan that `save` wrote. Raises StrategyError if the file holds none."""
        return load_plan(cls, path)

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"<Plan on {self.mesh}: {len(self.operators)} operators, {len(self.collectives)} collectives>"
