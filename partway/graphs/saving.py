"""Saves what each pass of a planned call made: the records that write."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import fx

from partway.compiler.passes import Around, Pass, PlanDraft, Planned, StepDraft, applied
from partway.compiler.plan_inputs import PlanInputs
from partway.fusion.program import Program
from partway.graphs import stages, text
from partway.graphs.asked import Asked, Level
from partway.graphs.figures import NOTHING, figures_of, key_of
from partway.graphs.files import NOTHING_CHANGED, CallFiles, Series, row_of, warn
from partway.graphs.folders import call_folder
from partway.graphs.index import PLAN, Row
from partway.graphs.record import Record, StepRecord
from partway.graphs.stages import Stage
from partway.graphs.text import Page
from partway.propagation.capture import capture
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.graph.port import Port
from partway.propagation.plan.plan import Plan
from partway.propagation.program.accumulate import Accumulation
from partway.propagation.program.local_program import LocalProgram
from partway.propagation.program.step import Step
from partway.runtime.launching.launchers import launch
from partway.strategy import Mesh, RuntimeStateError
from partway.strategy.notation import counted
from partway.strategy.units import human, lasting

_LOADED = "loaded from the cache"
_clock = time.perf_counter


def saved(wanted: Asked, name: str, processes: int | None) -> SavingRecord | None:
    """What saves the next call, of a function called `name`; None for a rank that is not saved, and where no folder can
    be made, which is a warning. `processes`: None in simulation."""
    rank = own_rank()
    if rank and not wanted.every_rank:
        return None
    try:
        folder = call_folder(wanted.folder, rank, name)
    except OSError as error:
        warn(wanted.folder, error)
        return None
    alone = processes is None and not rank and not dist.is_initialized()
    return SavingRecord(CallFiles(wanted, folder, rank, simulates=alone and wanted.every_rank))


def own_rank() -> int:
    """The rank of this process; of one that has not met the others, what its launcher says."""
    if dist.is_initialized():
        return dist.get_rank()
    try:
        found = launch()
    except RuntimeStateError:  # whoever has to know says so
        return 0
    return found.rank or 0 if found else 0


@dataclass(frozen=True)
class _Attempt:
    """A pass that ran on one mesh, with one setting.

    made   gives what it made, as long as somebody keeps that
    page   what it made, as text
    """

    stage: Stage
    mesh: Mesh
    made: Callable[[], Any]
    page: Page | None
    row: Row


class SavingRecord(Record):
    """Hears the passes of one call, and saves what each made."""

    hears = True

    def __init__(self, files: CallFiles) -> None:
        self.files = files
        self._figures = NOTHING  # of the graph that the last pass left
        self._stage: Stage | None = stages.CAPTURED  # of capture; None when that is done
        self._captured = Series(files, stages.CAPTURED)
        self._key: object = None  # of the graph that is captured
        self._attempts: list[_Attempt] = []
        self._profile: DeviceProfile | None = None
        self._planned = False
        self._start = _clock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with self.files.unharmed():
                self.files.tell(failed=_first_line(error))
                self._enter(None)
                self._decide(None)
                self.files.write_index()
            raise

    # -- Capture, which changes a module in place

    def capturing(self, each: capture.Pass, module: fx.GraphModule, inputs: Sequence[Port]) -> None:
        with self.files.unharmed():
            if self._key is None:
                self._left("trace", module, inputs, _clock() - self._start)
            self._enter(stages.OF_CAPTURE.get(each.__name__, self._stage))
        start = _clock()
        each(module)
        seconds = _clock() - start
        with self.files.unharmed():
            self._left(each.__name__, module, inputs, seconds)
            self.files.write_index()

    def _enter(self, stage: Stage | None) -> None:
        """The passes of `stage` come; None: those of capture are done."""
        if stage is not self._stage:
            self._captured.end()
            self._stage = stage
            if stage is not None:
                self._captured = Series(self.files, stage)

    def _left(self, name: str, module: fx.GraphModule, inputs: Sequence[Port], seconds: float) -> None:
        """A pass of capture is done. The first of a stage has a file, those after it where they changed something."""
        before, self._figures = self._figures, figures_of(module.graph, {})
        row = row_of(name, before, self._figures, seconds)
        key, old = key_of(module.graph), self._key
        self._key = key
        if key == old and not self._captured.empty:
            self.files.add(row)
            return
        if row.changed == NOTHING_CHANGED and key != old:
            row = row.model_copy(update={"changed": "names or arguments of operators"})
        page, level = text.captured(module, inputs), self.files.wanted.level
        if level >= Level.PASSES:
            page = page.as_it_is(level >= Level.PICTURES)
        self._captured.left(name, self.files.add(row), page)

    # -- From annotations to the plan

    def planning(self, around: Around[PlanDraft]) -> Around[PlanDraft]:
        def heard(each: Pass, draft: PlanDraft) -> PlanDraft:
            if self._planned:  # somebody asks for an explanation
                return around(each, draft)
            with self.files.unharmed():
                self._enter(None)
            start = _clock()
            try:
                after = around(each, draft)
            except Exception as error:
                with self.files.unharmed():
                    row = Row(
                        name=each.name, seconds=_clock() - start, changed=f"on {draft.mesh}: {_first_line(error)}"
                    )
                    self._attempts.append(_Attempt(stages.OF_PLANNING[each.makes], draft.mesh, lambda: None, None, row))
                raise
            seconds = _clock() - start
            with self.files.unharmed():
                self._made(each, after, seconds)
            return after

        return heard

    def _made(self, each: Pass, draft: PlanDraft, seconds: float) -> None:
        """A pass made what is in `draft`."""
        if each.makes == "local":
            self._decide(draft)
            self._lowered(draft.local, draft.inputs, seconds)
        elif each.makes == "plan":
            self._plan(draft.plan, draft.inputs, seconds)
        else:
            made = getattr(draft, each.makes)
            page, note = _attempted(each, draft)
            row = Row(name=each.name, nodes=self._figures.nodes, seconds=seconds, changed=f"on {draft.mesh}: {note}")
            kept = page.as_it_is(pictures=False) if self.files.wanted.level >= Level.PASSES else None
            stage = stages.OF_PLANNING[each.makes]
            self._attempts.append(_Attempt(stage, draft.mesh, weakref.ref(made), kept, row))

    def _decide(self, draft: PlanDraft | None) -> None:
        """Save what was tried: what is in `draft` was kept."""
        kept = [] if draft is None else [draft.annotations, draft.problem, draft.solution]
        for attempt in self._attempts:
            is_kept = any(attempt.made() is made for made in kept)
            detail = "" if is_kept else f"on_{'x'.join(map(str, attempt.mesh.sizes))}"
            if is_kept and attempt.stage is stages.SEARCHED:
                file = f"{stages.SEARCHED.name}.txt"  # the plan shows more of it
            else:
                file = self.files.save(attempt.stage, attempt.page, detail) if attempt.page else ""
            self.files.add(attempt.row.model_copy(update={"file": file, "kept": is_kept}))
        self._attempts.clear()

    def _lowered(self, local: LocalProgram, inputs: PlanInputs, seconds: float | None) -> None:
        self.files.tell(mesh=str(local.mesh))
        self.files.spread(local.mesh.device_num)
        for rank in self.files.folders:
            self.files.write_for(rank, "rank.txt", "\n".join(text.own_parts(local, rank)) + "\n")
        page, before = text.lowered(local, inputs.profile), self._figures
        self._figures = page.figures
        self.files.add(row_of("lower", before, self._figures, seconds, self.files.save(stages.LOWERED, page)))

    def _plan(self, plan: Plan, inputs: PlanInputs, seconds: float | None) -> None:
        self._planned = True
        self.files.save(stages.SEARCHED, text.searched(inputs.graph, plan))
        self.files.write(PLAN, plan.model_dump_json(indent=1) + "\n")
        loaded = "the plan was loaded from the cache: nothing was searched"
        self.files.tell(origin=loaded if seconds is None else f"search: {plan.certificate}")
        what = f"a step is predicted to take {lasting(plan.predicted_time)}, and to need {human(plan.memory.total)}"
        self.files.add(Row(file=PLAN, name="make_plan", seconds=seconds, changed=what))
        self.files.write_index()

    def planned(self, inputs: PlanInputs, planned: Planned) -> None:
        self._profile = inputs.profile
        with self.files.unharmed():
            self._enter(None)
            if not self._planned:
                self._lowered(planned.local, inputs, None)
                self._plan(planned.plan, inputs, None)

    def of_step(self, name: str) -> StepRecord:
        assert self._profile is not None
        return SavingStepRecord(self.files, self._profile, name and f"{name}/")


class SavingStepRecord(StepRecord):
    """Hears the passes of one step, and saves what each made, `inside` a folder of the call."""

    def __init__(self, files: CallFiles, profile: DeviceProfile, inside: str) -> None:
        self.files, self._profile, self._inside = files, profile, inside
        self._forward, self._backward = (Series(files, stage, inside) for stage in stages.OF_STEP)
        self._step: Step | None = None  # as the last pass left it
        self._fused = False

    def around(self, each: Pass, draft: StepDraft) -> StepDraft:
        start = _clock()
        after = applied(each, draft)
        seconds = _clock() - start
        with self.files.unharmed():
            if each.makes == "step":
                self._left(each.name, after.step, seconds)
            else:
                self._forward.end()
                self._backward.end()
                if draft.step is self._step:
                    self._ran(after.program.step, seconds)
                else:  # one of those that a step is taken apart to, which `made` has
                    self.files.add(Row(name=each.name, seconds=seconds))
        return after

    def _left(self, name: str, step: Step, seconds: float | None) -> None:
        """A pass left `step`."""
        before = self._step
        pages = text.sides(step, self._profile)
        found = text.undifferentiated(step.program) if before is None else before
        old = text.sides(found, self._profile)
        changed = False
        for i, (series, page) in enumerate(zip((self._forward, self._backward), pages, strict=False)):
            if before is not None and i < len(old) and _same(old[i], page):
                continue
            figures = old[i].figures if i < len(old) else NOTHING
            row = row_of(name, figures, page.figures, None if changed else seconds)
            series.left(name, self.files.add(row), page)
            changed = True
        if not changed and seconds is not None:
            self.files.add(Row(name=name, seconds=seconds, changed=NOTHING_CHANGED))
        self._step = step

    def _ran(self, step: Step, seconds: float | None) -> None:
        """The step that runs; `seconds`: of its fusion, None where it was loaded."""
        self._fused = True
        page = text.whole(step, self._profile)
        before = text.whole(self._step, self._profile).figures if self._step else NOTHING
        file = self.files.save(stages.FUSED, page, inside=self._inside)
        row = row_of("fuse", before, page.figures, seconds, file)
        self.files.add(row if self._step else row.model_copy(update={"before": None, "changed": _LOADED}))
        self.files.write_index()

    def made(self, made: Program | Accumulation | None) -> None:
        with self.files.unharmed():
            if isinstance(made, Program) and not self._fused:
                self._ran(made.step, None)
            if isinstance(made, Accumulation):
                for name, page in text.accumulated(made, self._profile).items():
                    file = self.files.save(stages.WAITING, page, name, self._inside)
                    row = row_of(f"accumulate, {name}", NOTHING, page.figures, None, file)
                    changed = row.changed if self._step else _LOADED
                    self.files.add(row.model_copy(update={"before": None, "changed": changed}))
                self.files.write_index()


def _same(before: Page, after: Page) -> bool:
    """Whether two pages show equal graphs."""
    one, other = before.graphs[""].graph, after.graphs[""].graph
    return one is other or key_of(one) == key_of(other)


def _attempted(each: Pass, draft: PlanDraft) -> tuple[Page, str]:
    """What a pass made that may not be kept, and a few words on it."""
    match each.makes:
        case "annotations":
            what = f"{counted(len(draft.annotations.allowed), 'tensor')} annotated"
            return Page(lambda: text.annotated(draft)), what
        case "problem":
            strategies = sum(len(v.options) for v in draft.problem.vertices)
            choices = counted(len(draft.problem.vertices), "choice")
            what = f"{choices} to make, of {counted(strategies, 'strategy', 'strategies')}"
            return Page(lambda: text.formulated(draft.problem)), what
        case _:
            what = f"the cheapest plan costs {draft.solution.cost:.6g}"
            return Page(lambda: text.tried(draft.problem, draft.solution)), what


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
