"""A function planned for one call, which makes the programs of ranks at the first access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import NoneType

import torch

from partway.annotations.annotate import Annotations
from partway.compiler.graphs_record import ProgramRecord, Record
from partway.compiler.passes import Draft, accumulated, differentiated_again, differentiated_program, fused
from partway.compiler.planning_lock import planning
from partway.options.parallel import ParallelContext
from partway.propagation.capture.export.autocast import without_autocast
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.graph.graph import Graph, differentiated
from partway.propagation.plan.plan import Plan
from partway.propagation.problem.problem import SearchProblem
from partway.propagation.program.accumulate import Accumulation
from partway.propagation.program.program import Program
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
    plan       a strategy for every operator, and the costs
    local      the forward of one rank
    entry      the cache entry on disk of the plan and its programs
    searched   returns the draft of the plan; a plan from disk is searched for again, once
    state      the state on which the call depends beside its arguments
    effects    the side effects of the function
    record     listens to the passes
    name       the name of the function
    """

    inputs: PlanInputs
    plan: Plan
    local: Program
    entry: Entry
    searched: Callable[[], Draft]
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
        with _making(), telling(what):
            name = f"program-{_bits(wanted)}"
            heard = self.record.of_program("" if wanted == differentiated(self.graph) else name)
            program = self.entry.fetch(
                name, lambda: fused(self._draft(wanted, heard), heard.around), Program, derived=True
            )
            heard.made(program)
            return program

    def accumulation_for(self, wanted: tuple[bool, ...]) -> Accumulation | None:
        """The backwards of `program_for(wanted)` with delayed reductions, or None if no gradient can wait."""
        with _making():
            name = f"accumulation-{_bits(wanted)}"
            heard = self.record.of_program(name)
            made = self.entry.fetch(
                name,
                lambda: accumulated(self._draft(wanted, heard), heard.around),
                Accumulation,
                NoneType,
                derived=True,
            )
            heard.made(made)
            return made

    def differentiated_again(self, program: Program, wanted: tuple[bool, ...]) -> Program:
        """`program`, the forward of one rank or the program of its gradients, with a backward of the outputs marked in
        `wanted` that is differentiated again."""
        with _making():
            return differentiated_again(self.inputs, program, wanted)

    def _draft(self, wanted: tuple[bool, ...], heard: ProgramRecord) -> Draft:
        return differentiated_program(self.inputs, self.local, wanted, heard.around)


@contextmanager
def _making() -> Iterator[None]:
    """A block that makes programs. Inference would record no gradients; a program has the casts of its function."""
    with planning(), torch.inference_mode(False), without_autocast():
        yield


def _bits(wanted: tuple[bool, ...]) -> str:
    """A name for a set of differentiated outputs."""
    return f"{len(wanted)}-{sum(want << i for i, want in enumerate(wanted)):x}"
