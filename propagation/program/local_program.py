"""The program that one rank runs, as data: a graph of local operators and conversions, what goes in and what comes out.

The text is the same on every rank; a conversion knows its rank only when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from ...strategy.errors import VerifyError
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ...strategy.placement import Kind, Placement, kind
from ..cost.conversion import step_kind
from ..graph.nodes import operator_name
from ..graph.port import Port
from ..ops.collectives import convert
from ..ops.kinds import payload_of_whole


@dataclass(frozen=True, slots=True)
class Conversion:
    """One conversion in a program, and why it is there.

    All of `axes`, in the order of the mesh, go from `source` to `target`, as one axis of `size` ranks would; size is
    the product of theirs. `whole_bytes` is what one rank would hold if none of these axes split the tensor.
    `gradient`: its transpose runs in the backward that was planned. `again`: it stands for a conversion that runs once
    more, as it is, in the backward (recompute.py). `repeated`: what it gives is not kept, and where the backward reads
    it this one runs again. Of an exchange `whole_bytes` are those of its dim in whole.
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
        """What happens in the "forward" or the "backward"."""
        if self.again:
            return kind(self.source, self.target) if phase == "backward" else Kind.NOTHING
        return step_kind(self.source, self.target, phase, self.gradient)

    def payload(self, phase: str) -> int:
        """The payload of the collective that it is in a phase: see `Collective.payload_bytes`."""
        forward = self.again or phase == "forward"
        return payload_of_whole(self.kind(phase), self.source, self.target, self.whole_bytes, self.size, forward)


@dataclass(frozen=True)
class PlacedPort:
    """An input or output of a program: what it is, its global shape, and its layout at rest."""

    port: Port
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part, the same on every rank."""
        return self.layout.local_shape(self.shape)

    def __str__(self) -> str:
        return f"{self.port.role.value} {self.port.name} {list(self.local_shape)} of {list(self.shape)} {self.layout}"


@dataclass(frozen=True)
class LocalProgram:
    """The forward that one rank runs, on its parts of the inputs.

    cost    what it costs, weighed, forward and backward: that of the choices it was made of, or less where two
            consumers asked for the same conversion
    """

    module: fx.GraphModule
    mesh: Mesh
    inputs: tuple[PlacedPort, ...]
    outputs: tuple[PlacedPort, ...]
    conversions: tuple[Conversion, ...]
    cost: float

    def __str__(self) -> str:
        return "\n".join(program_lines(self.module.graph, self.inputs))


def program_lines(graph: fx.Graph, inputs: tuple[PlacedPort, ...] = ()) -> list[str]:
    """A graph of local operators and conversions as text, one line a node; `inputs`: what its first ones are."""
    lines = []
    known = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            placed = next(known, None)
            lines.append(f"input {node.name}" + (f": {placed}" if placed else ""))
        elif node.op == "output":
            lines.append(f"return {', '.join(map(str, node.args[0]))}")
        elif node.target is convert:
            x, source, target, axes, size, _ = node.args
            lines.append(f"{node.name} = {source} -> {target} over {','.join(axes)} of {size}: {x}")
        else:
            lines.append(f"{node.name} = {operator_name(node)}{tuple(node.args)}".replace("'", ""))
    return lines


def verify_program(program: LocalProgram) -> LocalProgram:
    """Raise VerifyError unless every conversion of the text is in the list, once, and all fits the mesh."""
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
