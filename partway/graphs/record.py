"""What hears the passes of one planned call. These two do nothing, for calls of which nothing is saved; `saving.py` has
those that write, and is imported when the first call is saved.

    with record.watching():                  around all of planning
        record.capturing                     runs each pass of capture
        record.planning(around)              runs each pass from annotations to the plan
        record.planned(inputs, planned)      is told the plan, whether it was made or loaded
    heard = record.of_step(name)             for each step that is made
    heard.around                             runs each pass of the step
    heard.made(program)                      is told what came of it, whether it was made or loaded
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import fx

from partway.compiler.passes import Around, Pass, PlanDraft, Planned, StepDraft, applied
from partway.compiler.plan_inputs import PlanInputs
from partway.fusion.program import Program
from partway.graphs.asked import asked
from partway.propagation.capture import capture
from partway.propagation.graph.port import Port
from partway.propagation.program.accumulate import Accumulation


class StepRecord:
    """Hears the passes of one step."""

    def around(self, each: Pass, draft: StepDraft) -> StepDraft:
        """Runs a pass."""
        return applied(each, draft)

    def made(self, made: Program | Accumulation | None) -> None:
        """What came of the passes, whether they ran or it was loaded."""


class Record:
    """Hears the passes of one call. `hears`: whether it does anything with them."""

    hears = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All of planning is in the block."""
        yield

    def capturing(self, each: capture.Pass, module: fx.GraphModule, inputs: Sequence[Port]) -> None:
        """Runs a pass of capture."""
        capture.applied(each, module, inputs)

    def planning(self, around: Around[PlanDraft]) -> Around[PlanDraft]:
        """What runs a pass from annotations to the plan, as `around` does."""
        return around

    def planned(self, inputs: PlanInputs, planned: Planned) -> None:
        """The plan of the call, whether it was made or loaded."""

    def of_step(self, name: str) -> StepRecord:
        """What hears the passes of one step; `name`: "" for that of a usual call."""
        return StepRecord()


_SILENT = Record()


def record(name: str, processes: int | None) -> Record:
    """What hears the passes of the next call, of a function called `name`, as the environment asks. `processes`: None
    in simulation. Raises ContextError for variables that mean nothing."""
    wanted = asked()
    if wanted is None:
        return _SILENT
    from partway.graphs import saving

    return saving.saved(wanted, name, processes) or _SILENT
