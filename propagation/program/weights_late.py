"""A backward in two: first what another stage waits for, the gradients of its results, then the gradients of weights.

The backward of `y = x @ w` has two products, and the stage before needs one of them:

    backward    saved x, w, tangent t -> t @ w.T, x.T @ t
    first       saved x, w, tangent t -> t @ w.T; kept x, t
    rest        kept x, t             -> x.T @ t

The first is all that the gradients of `inputs` need, and the rest is what is left. What the rest reads of the first is
kept; a view is made again of what it views. (The stages of a pipeline run the rest where they would wait.)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import fx

from ..graph.graph import Text
from ..graph.nodes import is_view, returned_by
from .program import Program


@dataclass(frozen=True)
class WeightsLate:
    """The two parts of a backward.

    first    (saved..., tangents...) -> gradients of the `early` inputs, kept...
    rest     (kept...) -> gradients of the `late` inputs
    early    the inputs of the program whose gradients the first part gives, in order
    late     the others that need gradients
    """

    first: fx.GraphModule
    rest: fx.GraphModule
    early: tuple[int, ...]
    late: tuple[int, ...]


def weights_late(program: Program, inputs: Collection[int]) -> WeightsLate:
    """The backward of `program`, the gradients of `inputs` first; these are numbers of its inputs."""
    assert program.backward is not None
    needed = [i for i, needs in enumerate(program.needed) if needs]
    gradients = dict(zip(needed, returned_by(program.backward.graph), strict=True))
    needed = [i for i in needed if gradients[i] is not None]  # the others are zero
    early, late = (tuple(i for i in needed if (i in inputs) is first) for first in (True, False))
    wanted = [gradients[i] for i in early]
    there = _closure(wanted, ())
    rest = _closure([gradients[i] for i in late], [node for node in there if not is_view(node)])
    for node in [node for node in rest if node.target is operator.getitem]:
        if node.all_input_nodes[0] not in rest:  # one of several results
            del rest[node]
    kept = [
        node
        for node in program.backward.graph.nodes
        if node not in rest and node.op != "get_attr" and any(user in rest for user in node.users)
    ]
    kept += [gradients[i] for i in late if gradients[i] not in rest and gradients[i] not in kept]
    return WeightsLate(
        Text(program.backward, _graph(program.backward.graph, (*wanted, *kept), None)),
        Text(program.backward, _graph(program.backward.graph, [gradients[i] for i in late], kept)),
        early,
        late,
    )


def _closure(wanted: Iterable[fx.Node], known: Collection[fx.Node]) -> dict[fx.Node, None]:
    """The calls that compute `wanted`, without those that are `known`, and what only these need."""
    found, left, stop = dict[fx.Node, None](), list(wanted), set(known)
    while left:
        node = left.pop()
        if node not in found and node not in stop and node.op == "call_function":
            found[node] = None
            left += node.all_input_nodes
    return found


def _graph(graph: fx.Graph, results: Iterable[fx.Node], given: Collection[fx.Node] | None) -> fx.Graph:
    """The part of `graph` that computes `results` from `given` nodes; None: from its inputs, with all of them."""
    made, new = fx.Graph(), dict[fx.Node, fx.Node]()
    results = list(results)
    for node in graph.find_nodes(op="placeholder") if given is None else given:
        new[node] = made.placeholder(node.name)
        new[node].meta = dict(node.meta)
    needed = _closure(results, new)
    for node in graph.nodes:
        if node in needed or (node.op == "get_attr" and any(user in needed for user in node.users)):
            new[node] = made.node_copy(node, new.__getitem__)
    made.output(tuple(new[node] for node in results))
    return made
