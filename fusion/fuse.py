"""The fusion pass: the gradient AllReduces of a backward graph, grouped by a policy and issued early."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import Any

import torch
from torch import fx

from ..propagation.collectives import convert, convert_group, kind_of
from ..propagation.graph import Text
from ..strategy.placement import Kind
from . import by_index, by_size
from .cycles import split_cycles
from .policy import AUTO_MB, MB, AllReduceFusion, FusionMode, Groups, Member

Unit = tuple[fx.Node, ...]  # nodes that run as one


def fuse(backward: fx.GraphModule, tags: frozenset[int], policy: AllReduceFusion | None) -> fx.GraphModule:
    """A copy of `backward` in which each group of gradient AllReduces is one `convert_group`.

    The gradient AllReduces are the `convert` nodes of kind all_reduce whose tag is in `tags`. Each group, and each
    AllReduce that is alone, is placed right after the last of its operands; nodes that use a result are moved back
    as far as that needs; all others keep their order. Values do not change: a group reduces each member as before.
    Every `convert` must have its local value in `meta["val"]`. With `policy` None the copy is as it was. Raises
    ContextError if an index of the policy is larger than the number of gradient AllReduces.
    """
    found = gradient_all_reduces(backward.graph, tags) if policy else ()
    proposed = group([member(node) for node in found], policy) if policy else ()
    groups = split_cycles(proposed, _needs(backward.graph, found))
    units = [tuple(found[position] for position in positions) for positions in groups]
    fused = Text(backward, _rebuild(_schedule(backward.graph, units)))
    fused.meta.update(backward.meta)
    return fused


def gradient_all_reduces(graph: fx.Graph, tags: frozenset[int]) -> tuple[fx.Node, ...]:
    """The gradient AllReduces of `graph` in the order in which their operands are produced.

    (Autograd may place the AllReduces themselves long after: it runs what was recorded first last, and the
    conversions of parameters can stand anywhere before their first use.)
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    found = [node for node in graph.find_nodes(op="call_function", target=convert) if _is_gradient(node, tags)]
    return tuple(sorted(found, key=lambda node: (place[node.all_input_nodes[0]], place[node])))


def member(node: fx.Node) -> Member:
    """What a policy sees of a `convert` node."""
    arguments: tuple[Any, ...] = node.args
    operand, source, target, axes, _, tag = arguments
    value = operand.meta["val"] if isinstance(operand, fx.Node) else operand
    assert isinstance(value, torch.Tensor) and isinstance(tag, int), f"{node.format_node()} is no convert of a tensor"
    return Member(tag, source, target, tuple(axes), value.dtype, value.numel() * value.element_size())


def group(members: Sequence[Member], policy: AllReduceFusion) -> Groups:
    """The groups that `policy` makes of `members`, as positions: each position once, ascending within a group."""
    match policy.mode, policy.config:
        case FusionMode.INDEX, tuple(ends):
            return by_index.group(members, ends)
        case FusionMode.SIZE, int(limit):
            return by_size.group(members, limit * MB)
        case _:
            return by_size.group(members, AUTO_MB * MB)


def _is_gradient(node: fx.Node, tags: frozenset[int]) -> bool:
    _, source, target, _, _, tag = node.args
    return tag in tags and kind_of(str(source), str(target)) is Kind.ALL_REDUCE


def _needs(graph: fx.Graph, found: Sequence[fx.Node]) -> list[frozenset[int]]:
    """For each node of `found` the positions of those in `found` whose results it needs, also indirectly."""
    position = {node: index for index, node in enumerate(found)}
    needs: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        operands = node.all_input_nodes
        itself = frozenset(position[operand] for operand in operands if operand in position)
        needs[node] = itself.union(*(needs[operand] for operand in operands))
    return [needs[node] for node in found]


def _schedule(graph: fx.Graph, early: Iterable[Unit]) -> Iterator[Unit]:
    """All nodes in a topological order in which the `early` units come as soon as they are ready and the others
    as near to their old order as that allows."""
    early = frozenset(early)
    unit = {node: (node,) for node in graph.nodes} | {node: nodes for nodes in early for node in nodes}
    place = {node: index for index, node in enumerate(graph.nodes)}

    def priority(nodes: Unit) -> tuple[int, int]:
        # Inputs stay in front even of a collective of an input: readers of a graph expect them there.
        stage = 0 if nodes[0].op == "placeholder" else 1 if nodes in early else 2
        return stage, place[nodes[0]]

    sorter = TopologicalSorter(
        {nodes: {unit[operand] for node in nodes for operand in node.all_input_nodes} for nodes in unit.values()}
    )
    sorter.prepare()
    ready: list[tuple[tuple[int, int], Unit]] = []
    while sorter.is_active():
        for nodes in sorter.get_ready():
            heappush(ready, (priority(nodes), nodes))
        _, nodes = heappop(ready)
        yield nodes
        sorter.done(nodes)


def _rebuild(units: Iterable[Unit]) -> fx.Graph:
    """A new graph of `units` in their order, those of several nodes as one `convert_group`."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for unit in units:
        if len(unit) == 1:
            new[unit[0]] = graph.node_copy(unit[0], new.__getitem__)
            continue
        operands = [new[node.all_input_nodes[0]] for node in unit]
        _, source, target, axes, size, _ = unit[0].args
        arguments = operands, source, target, axes, size, [node.args[5] for node in unit]
        fused = graph.call_function(convert_group, arguments, name="convert_group")
        fused.meta["val"] = [node.meta["val"] for node in unit]
        for index, node in enumerate(unit):
            new[node] = graph.call_function(operator.getitem, (fused, index))
            new[node].meta = dict(node.meta)
    graph.lint()
    return graph
