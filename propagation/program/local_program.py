"""The program that one rank runs, as data: a graph of local operators and conversions, with its inputs and outputs.

The text is the same on every rank; a conversion reads its rank only when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import fx

from ...strategy.errors import VerifyError
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.placement import Kind, Placement, kind, step_kind
from ..graph.port import Port
from ..graph.printer import Notes, named, text_of
from ..ops.collectives import convert, convert_group, kind_of, payload_of_whole

_NAMED = 4  # tensors of a group that are named at most


@dataclass(frozen=True, slots=True)
class Conversion:
    """One conversion in a program, and its cause.

    All of `axes`, in the order of the mesh, go from `source` to `target`, like one axis of `size` ranks; size is
    the product of theirs. `whole_bytes` is what one rank would hold if none of these axes split the tensor.
    `gradient`: its transpose runs in the planned backward. `again`: it stands for a conversion whose forward runs once
    more in the backward (recompute.py). `repeated`: its result is not kept, and it runs again where the backward reads
    it. For an exchange, `whole_bytes` are those of the whole dim.
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

    def kind(self, phase: str) -> Kind:
        """The kind of the conversion in the "forward" or the "backward"."""
        if self.again:
            return kind(self.source, self.target) if phase == "backward" else Kind.NOTHING
        return step_kind(self.source, self.target, phase, self.gradient)

    def payload(self, phase: str) -> int:
        """The payload of its collective in a phase: see `Collective.payload_bytes`."""
        forward = self.again or phase == "forward"
        return payload_of_whole(self.kind(phase), self.source, self.target, self.whole_bytes, self.size, forward)


@dataclass(frozen=True)
class PlacedPort:
    """An input or output of a program: its port, its global shape, and its layout at rest."""

    port: Port
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part, the same on every rank."""
        return self.layout.local_shape(self.shape)

    @property
    def part(self) -> str:
        """A rank's part as text: its shape, that of the whole, and the layout."""
        return f"{list(self.local_shape)} of {list(self.shape)} {self.layout}"

    def __str__(self) -> str:
        return f"{self.port.role.value} {self.port.name} {self.part}"


@dataclass(frozen=True)
class LocalProgram:
    """The forward that one rank runs, on its parts of the inputs.

    cost    the weighted cost, forward and backward: that of its choices, or less if two consumers asked for the same
            conversion
    """

    module: fx.GraphModule
    mesh: Mesh
    inputs: tuple[PlacedPort, ...]
    outputs: tuple[PlacedPort, ...]
    conversions: tuple[Conversion, ...]
    cost: float

    def __str__(self) -> str:
        return self.text(self.module.graph, [p.port.name for p in self.outputs])

    def text(
        self, graph: fx.Graph, returns: Sequence[str] = (), costs: Mapping[fx.Node, str] = MappingProxyType({})
    ) -> str:
        """A graph with the program's inputs as text, and the causes of its collectives; `costs`: their costs."""
        parts = dict(zip(graph.find_nodes(op="placeholder"), self.inputs, strict=False))

        def notes(node: fx.Node) -> Iterator[str]:
            if node in parts:
                yield parts[node].part
            yield from causes(self.conversions, costs)(node)

        return text_of(graph, named(placed.port for placed in self.inputs), returns, notes)


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


def verify_program(program: LocalProgram) -> LocalProgram:
    """Return `program`. Raises VerifyError if its conversions are not those in its list, or do not fit the mesh."""
    mesh, tags = program.mesh, [n.args[5] for n in program.module.graph.nodes if n.target is convert]
    if len(set(tags)) != len(tags) or any(not 0 <= tag < len(program.conversions) for tag in tags):
        raise VerifyError("the conversions of the program are not those of its list")
    for c in program.conversions:
        if c.axes != tuple(a for a in mesh.axes if a in c.axes) or mesh.size(*c.axes) != c.size:
            raise VerifyError(
                f"the conversion of {c.tensor} over {','.join(c.axes)} is of {c.size} ranks; the mesh is {mesh}"
            )
    for placed in (*program.inputs, *program.outputs):
        if not placed.layout.fits(placed.shape):
            raise VerifyError(f"{placed.port.name} does not fit its layout {placed.layout}")
    return program
