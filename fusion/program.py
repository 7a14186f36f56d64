"""The Program: the forward and backward graphs that every rank runs, with its collectives after fusion."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from ..propagation.cost.cost import collective_seconds
from ..propagation.cost.profile import DeviceProfile
from ..propagation.ops.collectives import convert, convert_group
from ..propagation.program.collective import Collective, collective
from ..propagation.program.step import Step
from ..strategy.mesh import Mesh
from .fuse import fuse
from .modes import FusionPolicies
from .schedule import Schedule, predict, with_values
from .updates import updates_last


@dataclass(frozen=True)
class Program:
    """The graphs that one rank runs in one step, with their collectives.

    step          the forward graph and the backward graph (None where nothing is differentiated)
    collectives   in the order in which they run, forward first; each with its `members`
    profile       the device and network of its predictions
    """

    step: Step
    collectives: tuple[Collective, ...]
    profile: DeviceProfile = field(repr=False)

    @cached_property
    def schedule(self) -> Schedule:
        """The predicted schedule, computed at the first access."""
        step = with_values(self.step)
        backward = step.backward.graph if step.backward else None
        return predict(step.forward.graph, backward, step.program.mesh, self.profile)

    def __str__(self) -> str:
        costs: dict[fx.Node, str] = {}
        for phase, module in (("forward", self.step.forward), ("backward", self.step.backward)):
            if module is not None:
                costs |= {n: c.cost for n, c in collectives_in(module.graph, phase, self.step, self.profile).items()}
        return f"on {self.step.program.mesh}\n\n{self.step.text(costs)}"


def make_program(step: Step, policies: FusionPolicies, profile: DeviceProfile) -> Program:
    """The Program of `step` with the collectives of its parameters, and of buffer updates, grouped by `policies`."""
    mesh = step.program.mesh
    parameters = {c.tag: (str(c.source), str(c.target)) for c in step.program.conversions if c.parameter}
    if policies.allgather:
        step = with_values(step)
        step = replace(step, forward=fuse(step.forward, parameters, policies, mesh, profile))
    step = updates_last(step, policies.allreduce)
    if step.backward is not None:
        step = replace(step, backward=fuse(step.backward, parameters, policies, mesh, profile))
    graphs = [("forward", step.forward.graph)]
    graphs += [("backward", step.backward.graph)] if step.backward is not None else []
    collectives = [c for phase, graph in graphs for c in collectives_in(graph, phase, step, profile).values()]
    return Program(step, tuple(collectives), profile)


def collectives_in(graph: fx.Graph, phase: str, step: Step, profile: DeviceProfile) -> dict[fx.Node, Collective]:
    """The collectives that the "forward" or "backward" graph of a step issues, by node."""
    mesh, found = step.program.mesh, dict[fx.Node, Collective]()
    for node in graph.nodes:
        if node.target is convert:
            single = _collective(node.args[5], phase, step, profile)
            if single is not None:
                found[node] = single
        elif node.target is convert_group:
            members = [_collective(tag, phase, step, profile) for tag in node.args[5]]
            found[node] = _joined([m for m in members if m is not None], mesh, profile)
    return found


def _collective(tag: int, phase: str, step: Step, profile: DeviceProfile) -> Collective | None:
    # a conversion in the backward runs, even if the plan has none for the gradient
    conversion = replace(step.program.conversions[tag], gradient=True)
    return collective(conversion, phase, step.program.mesh, profile)


def _joined(members: list[Collective], mesh: Mesh, profile: DeviceProfile) -> Collective:
    """The collective that carries the tensors of all `members`."""
    first, payload = members[0], sum(m.payload_bytes for m in members)
    return replace(
        first,
        payload_bytes=payload,
        wire_bytes=sum(m.wire_bytes for m in members),
        tensor=f"{len(members)} tensors",
        predicted_time=collective_seconds(first.kind, payload, mesh, first.axes, profile),
        members=tuple(m.tensor for m in members),
    )
