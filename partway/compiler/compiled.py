"""A function planned for one call, which makes the programs of ranks at the first access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import NoneType

import torch

from partway.annotations.annotate import Annotations
from partway.compiler.graphs_record import Record, StepRecord
from partway.compiler.passes import PlanDraft, Planned, StepDraft, accumulated, fused, make_step, make_step_again
from partway.compiler.planning_lock import planning
from partway.fusion.program import Program
from partway.options.parallel import ParallelContext
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.graph.graph import Graph, differentiated
from partway.propagation.plan.plan import Plan
from partway.propagation.problem.problem import SearchProblem
from partway.propagation.program.accumulate import Accumulation
from partway.propagation.program.local_program import LocalProgram
from partway.propagation.program.step import Step
from partway.propagation.search.solution import Solution
from partway.requests.plan_inputs import PlanInputs
from partway.requests.planning_log import telling
from partway.reuse.cache import Entry
from partway.reuse.effects import Effects
from partway.reuse.state import State
from partway.strategy import Mesh


@dataclass(frozen=True)
class Compiled:
    """A function planned for one signature.

    inputs     the inputs of planning
    planned    the plan, and the forward of one rank
    entry      the cache entry on disk of the plan and its programs
    searched   returns the draft of the plan; a plan from disk is searched for again, once
    state      the state on which the call depends beside its arguments
    effects    the side effects of the function
    record     listens to the passes
    name       the name of the function
    """

    inputs: PlanInputs
    planned: Planned
    entry: Entry
    searched: Callable[[], PlanDraft]
    state: State
    effects: Effects
    record: Record
    name: str

    @property
    def graph(self) -> Graph:
        """The captured call."""
        return self.inputs.graph

    @property
    def context(self) -> ParallelContext:
        """The options of the call."""
        return self.inputs.context

    @property
    def profile(self) -> DeviceProfile:
        """The figures of the devices."""
        return self.inputs.profile

    @property
    def local(self) -> LocalProgram:
        """The forward of one rank."""
        return self.planned.local

    @property
    def plan(self) -> Plan:
        """A strategy for every operator, and the costs."""
        return self.planned.plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.local.mesh

    @property
    def annotations(self) -> Annotations:
        """The layouts that the annotations allow."""
        return self.searched().annotations

    @property
    def problem(self) -> SearchProblem:
        """The input of the search."""
        return self.searched().problem

    @property
    def solution(self) -> Solution:
        """The strategies that the search chose."""
        return self.searched().solution

    @property
    def program(self) -> Program:
        """The graphs that every rank runs."""
        with planning():  # first, since a cached_property holds its lock while this waits
            return self._program

    @cached_property
    def _program(self) -> Program:
        return self.program_for(differentiated(self.graph))

    def program_for(self, wanted: tuple[bool, ...]) -> Program:
        """The program whose backward starts from the outputs marked in `wanted`."""
        what = f"making a program of {self.name}"
        with planning(), torch.inference_mode(False), telling(what):  # inference would record no gradients
            name = f"program-{_bits(wanted)}"
            heard = self.record.of_step("" if wanted == differentiated(self.graph) else name)
            program = self.entry.fetch(
                name, lambda: fused(self._step(wanted, heard), heard.around), Program, derived=True
            )
            heard.made(program)
            return program

    def accumulation_for(self, wanted: tuple[bool, ...]) -> Accumulation | None:
        """The backwards of `program_for(wanted)` with delayed reductions, or None if no gradient can wait."""
        with planning(), torch.inference_mode(False):
            name = f"accumulation-{_bits(wanted)}"
            heard = self.record.of_step(name)
            made = self.entry.fetch(
                name, lambda: accumulated(self._step(wanted, heard), heard.around), Accumulation, NoneType, derived=True
            )
            heard.made(made)
            return made

    def step_again(self, local: LocalProgram, wanted: tuple[bool, ...]) -> Step:
        """The step of `local`, the forward of one rank or the program of its gradients, whose outputs marked in
        `wanted` are differentiated more than once."""
        with planning(), torch.inference_mode(False):
            return make_step_again(self.inputs, local, self.planned.parts, wanted)

    def _step(self, wanted: tuple[bool, ...], heard: StepRecord) -> StepDraft:
        return make_step(self.inputs, self.planned, wanted, heard.around)


def _bits(wanted: tuple[bool, ...]) -> str:
    """A name for a set of differentiated outputs."""
    return f"{len(wanted)}-{sum(want << i for i, want in enumerate(wanted)):x}"
