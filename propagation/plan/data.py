"""A plan as data: its tensors, operators, memory and certificate. Frozen values, read and written as JSON.

A new field has a default that says "unknown", so that plans of earlier versions can still be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from ...strategy.basics.units import human, lasting
from ...strategy.layout import Layout, layout
from ...strategy.mesh import Mesh
from ...strategy.notation import counted
from ...strategy.placement import placement_from_code
from ..graph.port import Role
from ..memory.held import Held, Purpose
from ..problem.problem import AMONG
from ..program.collective import Collective
from ..search.search import SEARCHES, SearchMode

SAME = 1e-9  # the relative difference of costs up to which they count as equal
_FORMAT = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class ProducerKind(StrEnum):
    """The producer of a tensor: an input of the call, an operator, or a constant (an operator that depends on no input
    and no parameter, which is not planned)."""

    INPUT = "input"
    OPERATOR = "operator"
    CONSTANT = "constant"


class Producer(_Frozen):
    """The producer of a tensor: result `result` of the operator (or the input, or the constant) called `name`."""

    kind: ProducerKind
    name: str
    result: int = 0

    @property
    def tensor(self) -> str:
        """The name that collectives give the tensor."""
        return f"{self.name}[{self.result}]" if self.result else self.name


class TensorPlan(_Frozen):
    """One input or output: its global shape, its layout at rest (a code for each axis), and the annotation.

    producer   of an output: where its tensor comes from; None for an input, and in plans of an earlier version
    seconds    of a trained parameter: of the optimizer's step on one device; 0 in plans of an earlier version
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    codes: tuple[str, ...]
    annotation: str = ""
    producer: Producer | None = None
    seconds: float = 0.0


class OperatorPlan(_Frozen):
    """One operator: the factor that it splits on each axis, or None, and the layouts of its tensors.

    seconds      of forward and backward on one device, without collectives
    producers    the producer of each operand; None in plans of an earlier version
    held_bytes   of its results, kept for the backward by one device; None in plans of an earlier version
    fate         "kept" for the backward, computed "again" there, or "gone" if the backward does not read the results;
                 empty in plans of an earlier version
    again        additional seconds of the backward if it computes the results again
    types        of each result, as float32[8, 16]; "" for other values; None in plans of an earlier version
    """

    name: str
    operator: str
    result: str
    module: str
    source: str
    factors: tuple[str | None, ...]
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    strategy: str
    seconds: float
    annotation: str = ""
    producers: tuple[Producer, ...] | None = None
    held_bytes: float | None = None
    fate: str = ""
    again: float = 0.0
    types: tuple[str, ...] | None = None


class Memory(_Frozen):
    """Bytes on one device at the peak, as memory_limit counts them.

    gradients     of parameters, as far as they are there by then
    optimizer     its states: `optimizer_states` copies of the parameters
    inputs        of the call, and buffers
    activations   kept for the backward, and not yet read by it
    again         recomputed by the backward, and not yet read by it
    working       results of the call, gradients of values, and tensors that operators are about to read
    phase, at     the time of the peak: the "forward" or the "backward" of an operator; empty in plans of an earlier
                  version
    """

    parameters: int
    gradients: int
    optimizer: int = 0
    inputs: int = 0
    activations: int
    again: int = 0
    working: int = 0
    phase: str = ""
    at: str = ""

    @classmethod
    def at_peak(cls, held: Held) -> Memory:
        """The bytes of `held` at its peak."""
        if not held.moments:
            return cls(parameters=0, gradients=0, activations=0)
        size, (phase, at, _) = held.at_peak, held.moments[held.when]
        return cls(
            parameters=round(size[Purpose.PARAMETERS]),
            gradients=round(size[Purpose.GRADIENTS]),
            optimizer=round(size[Purpose.OPTIMIZER]),
            inputs=round(size[Purpose.INPUTS]),
            activations=round(size[Purpose.KEPT]),
            again=round(size[Purpose.AGAIN]),
            working=round(size[Purpose.WORKING] + size[Purpose.VALUES] + size[Purpose.RESULTS]),
            phase=phase,
            at=at,
        )

    @property
    def total(self) -> int:
        """The sum of all parts."""
        held = self.parameters + self.gradients + self.optimizer + self.inputs
        return held + self.activations + self.again + self.working

    def __str__(self) -> str:
        parts = [
            f"{name} {human(size)}"
            for name, size in (
                ("parameters", self.parameters),
                ("gradients", self.gradients),
                ("optimizer", self.optimizer),
                ("inputs", self.inputs),
                ("activations", self.activations),
                ("computed again", self.again),
                ("working", self.working),
            )
            if size
        ]
        when = f", in the {self.phase} of {self.at}" if self.at else ""
        return f"{human(self.total)} at most{when}: {', '.join(parts) or 'nothing'}"


class Certificate(_Frozen):
    """The search's certificate for its plan.

    cost           the weighted cost of this plan
    bound          no plan under these annotations, and within this memory_limit, costs less (None: unknown)
    attained       another search found a plan that costs the bound: it is the optimum's cost
    proven         the plan is the optimum
    width          the most vertices that one table of the search joined
    memory_limit   bytes that a device may hold
    binding        without the limit the plan would be another
    given          the strategies come from a given plan: nothing was searched
    of_other_sizes the given plan was found by a search for tensors of other sizes
    approximate    enable_algo_approxi left strategies out: bound, attained and proven are about those it kept
    inference      no gradient is taken: costs are those of the forward, and nothing is kept for a backward
    ends           the predicted end of the step, in seconds from its beginning, with overlap; None: not predicted, as
                   only level 2 does it
    ends_bound     no plan's step ends earlier, by the same prices
    other_meshes   the number of other meshes on which the call could have been planned
    bound_elsewhere   no plan on them costs less (None: unknown)
    """

    mode: SearchMode
    cost: float
    bound: float | None
    proven: bool
    width: int
    attained: bool = False
    memory_limit: float | None = None
    binding: bool = False
    approximate: bool = False
    given: bool = False
    of_other_sizes: bool = False
    inference: bool = False
    ends: float | None = None
    ends_bound: float | None = None
    other_meshes: int = 0
    bound_elsewhere: float | None = None

    @property
    def gap(self) -> float | None:
        """The distance of the cost from the bound, relative to the bound; None if there is no bound."""
        if self.proven:
            return 0.0
        return None if self.bound is None or self.bound <= 0 else (self.cost - self.bound) / self.bound

    def __str__(self) -> str:
        said = f"{self._of_search()}{self._of_meshes()}"
        if self.ends is None or self.ends_bound is None:
            return said
        later = 100 * (self.ends / self.ends_bound - 1) if self.ends_bound else math.inf
        on = " on this mesh" if self.other_meshes else ""
        return f"{said}; the step ends after {lasting(self.ends)}, at most {later:.1f} % later than any{on}"

    def _of_meshes(self) -> str:
        if not self.other_meshes:
            return ""
        others = counted(self.other_meshes, "other mesh", "other meshes")
        if self.bound_elsewhere is None:
            return f" on this mesh; of {others} only plans of this mode are known"
        cheaper = 1 - self.bound_elsewhere / self.cost if self.cost else 0.0
        if cheaper <= SAME:
            return f" on this mesh, and on {others}"
        return f" on this mesh; on {others} a plan costs at most {100 * cheaper:.1f} % less"

    def _of_search(self) -> str:
        binds = self.binding and self.memory_limit is not None
        within = f" within memory_limit {human(self.memory_limit or 0)}" if binds else ""
        of = " without a backward" if self.inference else ""
        if self.of_other_sizes:
            return f"none{of}{within}: the strategies are those of the plan for other sizes"
        if self.given:
            return f"none{of}{within}: the strategies are those of a plan that was given"
        search = f"{self.mode.value}{of}{within}"
        optimum = f"the optimum{AMONG if self.approximate else ''}"
        if self.proven:
            return f"{search}: {optimum}, proven"
        if self.gap is None:
            return f"{search}: no bound"
        if self.attained:
            return f"{search}: {100 * self.gap:.1f} % above {optimum}"
        why = " (the duality gap)" if within and SEARCHES[self.mode].exact else ""
        return f"{search}: at most {100 * self.gap:.1f} % above {optimum}{why}"


class MemoryPoint(_Frozen):
    """One plan of a trade-off: its peak bytes on a device, and the seconds of a step."""

    held: int
    seconds: float


class PlanData(_Frozen):
    """The data of a plan; see Plan."""

    format: int = Field(default=_FORMAT, ge=_FORMAT, le=_FORMAT)
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] | None = None  # of the job, if the mesh is a part of it
    inputs: tuple[TensorPlan, ...]
    operators: tuple[OperatorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    collectives: tuple[Collective, ...]
    memory: Memory
    certificate: Certificate
    unknown_operators: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_ranks_of_all(self, made: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = made(self)
        if self.ranks is None:
            data.pop("ranks", None)
        return data

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return Mesh(dict(zip(self.axes, self.sizes, strict=True)), self.ranks)

    @property
    def parameters(self) -> dict[str, Layout]:
        """The layout at rest of every parameter, by name."""
        return {t.name: self.layout_of(t.codes) for t in self.inputs if t.role is Role.PARAMETER}

    @property
    def predicted_time(self) -> float:
        """Seconds of one step without overlap: forward, backward and the optimizer's step."""
        operators = sum(o.seconds + o.again for o in self.operators)
        return operators + sum(c.predicted_time for c in self.collectives) + self.optimizer_time

    @property
    def optimizer_time(self) -> float:
        """Seconds of the optimizer's step on one device."""
        return sum(t.seconds for t in self.inputs)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in one step."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def has_producers(self) -> bool:
        """Whether it has the producer of every operand and output; plans of an earlier version do not."""
        known = (*(o.producers for o in self.operators), *(t.producer for t in self.outputs))
        return all(producer is not None for producer in known)

    def layout_of(self, codes: Iterable[str]) -> Layout:
        """The layout on the plan's mesh that `codes` stand for, one code for each axis."""
        return layout(self.mesh, tuple(map(placement_from_code, codes)))

    def collectives_by_place(self) -> dict[str, list[Collective]]:
        """The collectives of each operator, by its name, and of each output, by `output NAME`."""
        by_place: dict[str, list[Collective]] = {}
        for c in self.collectives:
            by_place.setdefault(c.where, []).append(c)
        return by_place
