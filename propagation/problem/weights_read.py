"""The parameters that the backward reads: what was gathered of them is kept, or gathered again.

Of three operators, embedding(table, ids), linear(x, w, b) and y + e, the backward reads w, for the gradient of x. It
reads none of table, b and e, which only take a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from ..graph.graph import Graph
from ..graph.nodes import Value, operands, operator_name, rearranges, source_of, values_of
from ..graph.port import Role
from ..rules.custom import Rows
from ..rules.table import rule_of


def weights_read(graph: Graph, flows: frozenset[Value], recomputed: frozenset[fx.Node], own: Rows) -> frozenset[Value]:
    """The parameters, and values made from them by `rearranges` alone, that the backward reads. (A bias or a table of
    embeddings only gets a gradient.) Operators in `recomputed` read all their operands again."""
    weights = {Value(port.node) for port in graph.inputs if port.role is Role.PARAMETER}
    users = []
    for node in graph.nodes:
        sources = [source_of(operand) for operand in operands(node)]
        if node.target is not operator.getitem and not weights.isdisjoint(sources):
            users.append((node, sources))
            if rearranges(node) and weights.issuperset(sources):
                weights.update(values_of(node))
    read: set[Value] = set()
    for node, sources in reversed(users):
        results = values_of(node)
        if weights.issuperset(results):
            read.update(sources if not read.isdisjoint(results) else ())
        elif not flows.isdisjoint(results):
            reads = _reads(node, [source in flows for source in sources], own)
            read.update(s for i, s in enumerate(sources) if s in weights and (node in recomputed or reads(i)))
    return frozenset(read)


def _reads(node: fx.Node, flows: list[bool], own: Rows) -> Callable[[int], bool]:
    """Whether the backward of `node` reads operand i: not if it is linear in it, jointly with all operands to which a
    gradient goes (`flows`)."""
    rule = rule_of(node, own)
    # `convolution_backward` takes all operands for their sizes
    takes_all = operator_name(node).startswith(("aten.conv", "partway.padded_conv"))

    def reads(i: int) -> bool:
        if rule is None:
            return True
        if i in rule.additive:
            return False
        together = max((linear for linear in rule.linear if i in linear), key=len, default=None)
        return takes_all or together is None or any(flow for j, flow in enumerate(flows) if j not in together)

    return reads
