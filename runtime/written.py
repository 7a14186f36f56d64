"""What a call writes into is written where it lies: a cache of keys and values has no copy.

In the graph of a call an input that the function writes into is an input and an output, the new value. Where all that
happens to it is that elements are put in the place of its own, and nothing else that is returned may have its memory,
the program writes into the part that it is given. (A call that fails half-way has then written some, as in PyTorch.)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..propagation.graph.port import Role
from ..propagation.program.local_program import PlacedPort
from ..propagation.program.step import Step, returned_by
from .memory import memory_of, overwriting
from .slices import Placed


def written_in_place(step: Step, graph: fx.Graph) -> Mapping[int, int]:
    """The outputs of `step`, by their places, that are inputs written in place: the place of each one's input. `graph`
    is the forward, with its results and nothing that a backward reads."""
    inputs = {p.port.name: i for i, p in enumerate(step.program.inputs) if p.port.role is Role.INPUT}
    placeholders, returned = graph.find_nodes(op="placeholder"), returned_by(graph)
    found: dict[int, int] = {}
    for out, (placed, node) in enumerate(zip(step.program.outputs, returned, strict=True)):
        if placed.port.role is not Role.INPUT_UPDATE:
            continue
        place = inputs[placed.port.name]
        chain = _chain(node, placeholders[place])
        others = (memory_of(n) for i, n in enumerate(returned) if i != out and isinstance(n, fx.Node))
        if chain and _lie_alike(step.program.inputs[place], placed) and chain.isdisjoint(others):
            found[out] = place
    return found


def _chain(node: fx.Node, given: fx.Node) -> frozenset[fx.Node]:
    """The values between the input `given` and its new value `node`, both with them, each of which is the last one with
    some elements replaced; none where anything else is done on the way."""
    chain = [node]
    while node is not given:
        overwrite = overwriting(node, {given}) if node.op == "call_function" else None
        if overwrite is None or overwrite.args[0] is not node.all_input_nodes[0] or not overwrite.replaces:
            return frozenset()
        node = overwrite.args[0]
        chain.append(node)
    return frozenset(chain)


def _lie_alike(given: PlacedPort, placed: PlacedPort) -> bool:
    """Whether a part of the input may become the part of the output."""
    same = (given.layout, given.shape, given.dtype) == (placed.layout, placed.shape, placed.dtype)
    return same and not given.layout.adds and Placed(given.layout, given.shape).even
