"""The Program: the forward and backward graphs that every rank runs, with its collectives after fusion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from ..propagation.collectives import convert, convert_group
from ..propagation.cost import collective_seconds
from ..propagation.differentiate import Step
from ..propagation.lower import Collective, collective, program_lines
from ..propagation.profile import DeviceProfile
from ..strategy.mesh import Mesh
from ..strategy.placement import Kind
from .fuse import fuse
from .policy import AllReduceFusion


@dataclass(frozen=True)
class Program:
    """What one rank runs for one step.

    step          the forward graph and the backward graph (None where nothing is differentiated)
    collectives   in the order in which they run, forward first; each with its `members`
    """

    step: Step
    collectives: tuple[Collective, ...]

    def __str__(self) -> str:
        inputs = self.step.program.inputs
        parts = [f"on {self.step.program.mesh}", "", "forward", *program_lines(self.step.forward.graph, inputs)]
        if self.step.backward is not None:
            parts += ["", "backward", *program_lines(self.step.backward.graph)]
        return "\n".join(parts)


def make_program(step: Step, policy: AllReduceFusion | None, profile: DeviceProfile) -> Program:
    """The Program of `step` with its gradient AllReduces grouped by `policy` (None: each by itself)."""
    if step.backward is not None:
        step = replace(step, backward=fuse(step.backward, gradient_tags(step), policy))
    graphs = [("forward", step.forward.graph)]
    graphs += [("backward", step.backward.graph)] if step.backward is not None else []
    found = [c for phase, graph in graphs for c in _collectives(graph, phase, step, profile)]
    return Program(step, tuple(found))


def gradient_tags(step: Step) -> frozenset[int]:
    """The conversions whose backward is the AllReduce of a parameter's gradient."""
    return frozenset(c.tag for c in step.program.conversions if c.parameter and c.kind("backward") is Kind.ALL_REDUCE)


def _collectives(graph: fx.Graph, phase: str, step: Step, profile: DeviceProfile) -> Iterator[Collective]:
    mesh, conversions = step.program.mesh, step.program.conversions
    if phase == "backward":  # what stands there runs, whether or not it was planned to
        conversions = tuple(replace(conversion, gradient=True) for conversion in conversions)
    for node in graph.nodes:
        if node.target is convert:
            found = collective(conversions[node.args[5]], phase, mesh, profile)
            if found is not None:
                yield found
        elif node.target is convert_group:
            members = [collective(conversions[tag], phase, mesh, profile) for tag in node.args[5]]
            yield _joined([m for m in members if m is not None], mesh, profile)


def _joined(members: list[Collective], mesh: Mesh, profile: DeviceProfile) -> Collective:
    """One collective that carries several tensors."""
    first, payload = members[0], sum(m.payload_bytes for m in members)
    return replace(
        first,
        payload_bytes=payload,
        wire_bytes=sum(m.wire_bytes for m in members),
        tensor=f"{len(members)} tensors",
        predicted_time=collective_seconds(first.kind, payload, mesh, first.axes, profile),
        members=tuple(m.tensor for m in members),
    )
