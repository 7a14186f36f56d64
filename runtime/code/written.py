"""Writes into inputs in place, so that a cache of keys and values is not copied.

In the graph of a call, an input that the function writes into is an input and an output, the new value. If one operator
that replaces some of its elements is its only reader, and no other output may share its memory, the program writes into
the part that it is given. (A call that fails half-way has then written some elements, as in PyTorch.)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ...propagation.graph.nodes import returned_by
from ...propagation.graph.port import Role
from ...propagation.program.program import PlacedPort, Program
from .memory import memory_of, overwriting
from .slices import Placed


def written_in_place(program: Program, graph: fx.Graph) -> Mapping[int, int]:
    """Map the outputs of `program` that are inputs written in place, by place, to the places of these inputs. `graph`
    is the forward, which returns only results and nothing for a backward."""
    inputs = {p.port.name: i for i, p in enumerate(program.inputs) if p.port.role is Role.INPUT}
    placeholders, returned = graph.find_nodes(op="placeholder"), returned_by(graph)
    memory = [memory_of(node) if isinstance(node, fx.Node) else None for node in returned]
    found: dict[int, int] = {}
    for out, (placed, node) in enumerate(zip(program.outputs, returned, strict=True)):
        if placed.port.role is not Role.INPUT_UPDATE:
            continue
        place = inputs[placed.port.name]
        overwrite = overwriting(node, {placeholders[place]}) if node.op == "call_function" else None
        written = overwrite is not None and overwrite.owner is placeholders[place] is overwrite.args[0]
        if written and memory.count(node) == 1 and _lie_alike(program.inputs[place], placed):
            found[out] = place
    return found


def _lie_alike(given: PlacedPort, placed: PlacedPort) -> bool:
    """Whether a part of the input may become the part of the output."""
    same = (given.layout, given.shape, given.dtype) == (placed.layout, placed.shape, placed.dtype)
    return same and not given.layout.adds and Placed(given.layout, given.shape).even
