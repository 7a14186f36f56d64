"""The conversions of a program, and the collectives that they run: the bytes, the cost and the cause of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...strategy.basics.units import human, lasting
from ...strategy.mesh import Mesh
from ...strategy.placement import Kind, Placement, kind, step_kind
from ..cost.cost import Hierarchy, collective_seconds, wire_bytes
from ..cost.profile import DeviceProfile
from ..graph.printer import Notes
from ..ops.collectives import convert, convert_group, is_gather, is_reduction, kind_of, payload_of_whole
from ..problem.problem import SUMMED_IN

PHASES = ("forward", "backward")
_NAMED = 4  # tensors of a group that are named at most


@dataclass(frozen=True, slots=True)
class Conversion:
    """One conversion in a program, and its cause.

    All of `axes`, in the order of the mesh, go from `source` to `target`, like one axis of `size` ranks; size is
    the product of theirs. `whole_bytes` is what one rank would hold if none of these axes split the tensor.
    `gradient`: its transpose runs in the planned backward. `again`: it stands for a conversion whose forward runs once
    more in the backward (recompute.py). `repeated`: its result is not kept, and it runs again where the backward reads
    it. For an exchange, `whole_bytes` are those of the whole dim. `wider`: how many times as many bytes an element has
    while sums of the backward send it (gradient_fp32_sync). `hierarchies`: the kinds of collectives over its axes that
    have several steps if they are large.
    """

    tag: int
    tensor: str
    axes: tuple[str, ...]
    size: int
    source: Placement
    target: Placement
    whole_bytes: int
    dtype: torch.dtype
    gradient: bool
    parameter: bool
    producer: str
    consumer: str
    where: str
    path: str
    line: str
    again: bool = False
    repeated: bool = False
    wider: int = 1
    hierarchies: tuple[Hierarchy, ...] = ()

    def kind(self, phase: str) -> Kind:
        """The kind of the conversion in the "forward" or the "backward"."""
        if self.again:
            return kind(self.source, self.target) if phase == "backward" else Kind.NOTHING
        return step_kind(self.source, self.target, phase, self.gradient)

    def payload(self, phase: str) -> int:
        """The payload of its collective in a phase: see `Collective.payload_bytes`."""
        forward = self.again or phase == "forward"
        kind, whole = self.kind(phase), self.whole_bytes * (self.wider if self.is_wide(phase) else 1)
        return payload_of_whole(kind, self.source, self.target, whole, self.size, forward)

    def hierarchy(self, kind: Kind) -> Hierarchy | None:
        """The steps of a large collective of `kind` over its axes; None if it has one step."""
        return next((each for each in self.hierarchies if each.kind is kind), None)

    def is_wide(self, phase: str) -> bool:
        """Whether it is a sum in a phase that sends wider elements than its tensor has."""
        return self.wider > 1 and not self.again and phase == "backward" and is_reduction(self.kind(phase))


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program. Bytes are those of one rank; `members` are the tensors of a fused one.

    payload_bytes   as defined for the kind in `propagation/ops/collectives.py`
    wire_bytes      sent by one rank
    predicted_time  seconds, by the device profile
    where, path     the operator that required the conversion, and the module it is in
    steps           what it does in several steps: "" if it has one
    """

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    wire_bytes: float
    phase: str
    tensor: str
    source: str
    producer: str
    consumer: str
    where: str
    path: str
    dtype: str
    predicted_time: float
    tag: int
    members: tuple[str, ...] = ()
    steps: str = ""

    @property
    def cost(self) -> str:
        """The bytes that each rank sends, and the predicted time."""
        sent = f"{self.group_size} ranks send {human(self.wire_bytes)} each"
        return f"{sent}, {f'{self.steps}, ' if self.steps else ''}{lasting(self.predicted_time)}"

    def __str__(self) -> str:
        return (
            f"{self.phase} {self.kind} over {','.join(self.axes)} ({self.group_size} ranks) of {self.tensor}, "
            f"{self.payload_bytes:,} bytes: {self.producer} -> {self.consumer}"
        )


def collective(conversion: Conversion, phase: str, mesh: Mesh, profile: DeviceProfile) -> Collective | None:
    """The collective of `conversion` in `phase`, or None if it needs no other rank there."""
    kind = conversion.kind(phase)
    if not kind.communicates:
        return None
    payload = conversion.payload(phase)
    return Collective(
        kind=kind,
        axes=conversion.axes,
        group_size=conversion.size,
        payload_bytes=payload,
        wire_bytes=wire_bytes(kind, payload, conversion.size),
        phase=phase,
        tensor=conversion.tensor,
        source=conversion.line,
        producer=conversion.producer,
        consumer=conversion.consumer,
        where=conversion.where,
        path=conversion.path,
        dtype=str(SUMMED_IN if conversion.is_wide(phase) else conversion.dtype).removeprefix("torch."),
        predicted_time=collective_seconds(kind, payload, mesh, conversion.axes, profile),
        tag=conversion.tag,
        members=(conversion.tensor,),
        steps=_steps(conversion.hierarchy(kind), payload, conversion.size),
    )


def _steps(hierarchy: Hierarchy | None, payload: int, size: int) -> str:
    """What a collective does in several steps."""
    if hierarchy is None or payload < hierarchy.least:
        return ""
    units = f"{size // hierarchy.within} units of {hierarchy.within} ranks"
    first, then = ("between", "inside") if is_gather(hierarchy.kind) else ("inside", "between")
    return f"{first} {units} and then {then} these"


def collectives_in(
    graph: fx.Graph, phase: str, conversions: Sequence[Conversion], mesh: Mesh, profile: DeviceProfile
) -> dict[fx.Node, Collective]:
    """The collectives that a "forward" or "backward" graph issues, by node."""

    def single(tag: int) -> Collective | None:
        # a conversion in the backward runs, even if the plan has none for the gradient
        return collective(replace(conversions[tag], gradient=True), phase, mesh, profile)

    found = dict[fx.Node, Collective]()
    for node in graph.nodes:
        if node.target is convert:
            if (alone := single(node.args[5])) is not None:
                found[node] = alone
        elif node.target is convert_group:
            members = [each for tag in node.args[5] if (each := single(tag)) is not None]
            steps = conversions[node.args[5][0]].hierarchy(members[0].kind)
            found[node] = _joined(members, steps, mesh, profile)
    return found


def _joined(members: list[Collective], steps: Hierarchy | None, mesh: Mesh, profile: DeviceProfile) -> Collective:
    """The collective that carries the tensors of all `members`."""
    first, payload = members[0], sum(m.payload_bytes for m in members)
    return replace(
        first,
        payload_bytes=payload,
        wire_bytes=sum(m.wire_bytes for m in members),
        tensor=f"{len(members)} tensors",
        predicted_time=collective_seconds(first.kind, payload, mesh, first.axes, profile),
        members=tuple(m.tensor for m in members),
        steps=_steps(steps, payload, first.group_size),
    )


def causes(conversions: Sequence[Conversion], costs: Mapping[fx.Node, str]) -> Notes:
    """The notes on the collectives of a graph: their costs, if known, and their causes."""

    def notes(node: fx.Node) -> Iterator[str]:
        if node in costs:
            yield costs[node]
        if node.target is convert_group:
            tensors = [conversions[tag].tensor for tag in node.args[5]]  # type: ignore[index, union-attr]
            more = f" and {len(tensors) - _NAMED} more" if len(tensors) > _NAMED else ""
            yield f"of {', '.join(tensors[:_NAMED])}{more}"
        elif node.target is convert and kind_of(str(node.args[1]), str(node.args[2])).communicates:
            c = conversions[node.args[5]]  # type: ignore[index]
            yield f"of {c.tensor}: {c.producer} meets {c.consumer}"

    return notes
