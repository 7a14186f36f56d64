"""Values of the forward that the backward computes again instead of keeping them.

`recompute` is the mechanism; three functions choose the values:

    planned            by the plan: memory/keeping.py
    checkpointed       in calls of torch.utils.checkpoint: activations
    within_others      slices that are a part of a window or a whole that is kept too
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import fx

from ...strategy.cut import SliceWindow
from ...strategy.placement import Kind, Shard, kind, placement_from_code
from ..graph.graph import Text
from ..graph.nodes import (
    bytes_of,
    calls_of,
    compute_again,
    computed_again,
    draws_random_numbers,
    is_identity,
    is_pointwise,
    is_view,
    region_of,
    returned_by,
)
from ..ops.collectives import TAG, convert, kind_of
from ..ops.experts import counted
from ..ops.random_numbers import draw
from ..rules.windows import own_slice, place_in
from .any_size import size_of
from .collective import Conversion
from .differentiate import undo_views
from .program import Program

_slice = torch.ops.aten.slice.Tensor


def recompute(program: Program, chosen: Collection[fx.Node]) -> Program:
    """`program` with those of its saved values that are in `chosen`, nodes of its forward, computed again in the
    backward, each right before its first use.

    They are computed from values not in `chosen`: from inputs, and from values that are saved for it. A conversion that
    runs again has its own entry among the program's, marked `again`.
    """
    count = len(program.outputs)
    saved = returned_by(program.forward.graph)[count:]
    again = _needed([node for node in saved if node in chosen], chosen)
    if program.backward is None or not any(node in again for node in saved):
        return program
    place = {node: i for i, node in enumerate(program.forward.graph.nodes)}
    leaves = {operand for node in again for operand in node.all_input_nodes if operand not in again}
    kept = list(dict.fromkeys([*(s for s in saved if s not in again), *sorted(leaves, key=place.__getitem__)]))

    results = returned_by(program.forward.graph)[:count]
    forward = _computing((*results, *kept), program.forward.graph)

    backward, conversions = fx.Graph(), list(program.conversions)
    placeholders = program.backward.graph.find_nodes(op="placeholder")
    stands_for = dict(zip(placeholders, saved, strict=False))
    standing = dict(zip(saved, placeholders, strict=False))
    values = {node: _placeholder_like(backward, standing.get(node, node)) for node in kept}
    env = {node: _placeholder_like(backward, node) for node in placeholders[len(saved) :]}

    def value(node: fx.Node) -> fx.Node:
        if node in stands_for and node not in env:
            for missing in sorted(_needed([stands_for[node]], again, values), key=place.__getitem__):
                if is_identity(missing):
                    values[missing] = values[missing.all_input_nodes[0]]
                    continue
                values[missing] = backward.node_copy(missing, values.__getitem__)
                compute_again(values[missing], True)
                if missing.target is convert:
                    values[missing].update_arg(TAG, len(conversions))
                    conversions.append(_once_more(conversions, missing, len(conversions)))
            env[node] = values[stands_for[node]]
        return env[node]

    for node in calls_of(program.backward.graph):
        for operand in node.all_input_nodes:
            value(operand)
        env[node] = backward.node_copy(node, env.__getitem__)
    returned = returned_by(program.backward.graph)
    backward.output(tuple(None if node is None else value(node) for node in returned))
    undo_views(backward)
    constants = {
        str(node.target): getattr(module, str(node.target))
        for module in (program.forward, program.backward)
        for node in module.graph.find_nodes(op="get_attr")
    }
    return replace(
        program,
        conversions=tuple(conversions),
        forward=Text(constants, forward),
        backward=Text(constants, backward),
    )


def _needed(wanted: list[fx.Node], chosen: Collection[fx.Node], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that are computed to have `wanted`: these, and recursively their operands that are in `chosen` and not
    in `known`. A constant is available anywhere."""
    needed: set[fx.Node] = set()
    left = [node for node in wanted if node not in known]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            operands = (o for o in node.all_input_nodes if o in chosen or o.op == "get_attr")
            left += [operand for operand in operands if operand not in known]
    return needed


def _computing(wanted: Collection[fx.Node], graph: fx.Graph) -> fx.Graph:
    """A graph with all inputs of `graph` that returns `wanted`, and computes nothing else."""
    live = _needed([*wanted, *graph.find_nodes(op="placeholder")], set(graph.nodes))
    computing, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in live:
            copies[node] = computing.node_copy(node, copies.__getitem__)
    computing.output(tuple(copies[node] for node in wanted))
    return computing


def _placeholder_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.target = placeholder.name  # an argument of the graph's function, so it must be unique too
    placeholder.meta = dict(node.meta)
    if placeholder.meta["val"].requires_grad:  # an input of the forward; a backward is not differentiated
        placeholder.meta["val"] = placeholder.meta["val"].detach()
    return placeholder


def _once_more(conversions: list[Conversion], node: fx.Node, tag: int) -> Conversion:
    """The entry of the program's list for the conversion `node` when it runs again."""
    return replace(conversions[_tag(node)], tag=tag, again=True)


def planned(program: Program) -> frozenset[fx.Node]:
    """The nodes of the forward of `program` that the plan has the backward compute again, and those that cost nothing
    again: views, and elementwise operators that only the backward reads, or whose operands are constants."""
    graph = program.forward.graph
    live = _needed(list(returned_by(graph)[: len(program.outputs)]), set(graph.nodes))
    chosen: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    for node in calls_of(graph):
        if all(operand in constant or operand.op == "get_attr" for operand in node.all_input_nodes):
            constant.add(node)
        if node.target is operator.getitem:
            again = node.all_input_nodes[0] in chosen
        elif node.target is size_of:
            again = True
        elif draws_random_numbers(node):
            again = False
        elif node.target is convert:
            again = computed_again(node) is True
        else:
            free = is_view(node) or (is_pointwise(node.target) and (node in constant or node not in live))
            again = free if (noted := computed_again(node)) is None else noted or is_view(node)
        if again:
            chosen.add(node)
    return frozenset(chosen - _as_large_as_its_operand(program, chosen, live))


def _as_large_as_its_operand(program: Program, chosen: Collection[fx.Node], live: Collection[fx.Node]) -> set[fx.Node]:
    """Those of `chosen` that are computed from a value of at least their size that would be kept for them alone: a ReLU
    of the result of a norm. (A plan decides for all results of an operator at once.) `live`: the nodes that the forward
    computes for itself."""
    saved = dict.fromkeys(map(_detached, returned_by(program.forward.graph)[len(program.outputs) :]))
    again = [node for node in saved if node in chosen]
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in again:
        needed = _needed([node], chosen)
        for leaf in {operand for each in needed for operand in each.all_input_nodes if operand not in needed}:
            readers.setdefault(leaf, []).append(node)
    return {
        node
        for leaf, (node, *more) in readers.items()
        if not more
        and node in live
        and not is_view(node)
        and leaf.op == "call_function"
        and leaf not in saved
        and leaf.target is not convert
        and bytes_of(leaf.meta["val"]) >= bytes_of(node.meta["val"]) > 0
    }


def _conversion_kind(node: fx.Node) -> Kind:
    if node.target is not convert:
        return Kind.NOTHING
    _, source, target, *_ = node.args
    return kind_of(str(source), str(target))


def checkpointed(program: Program) -> frozenset[fx.Node]:
    """The nodes of the forward of `program` inside calls of torch.utils.checkpoint, except those that are kept:

    what others read     the results of a region, which other regions start from
    random numbers       those of torch's generator, and values computed from them alone: drawing again would give
                         other numbers (with a key they are the same again)
    collectives          their results, so that none runs twice unasked
    numbers of rows      so that nobody hears of them twice
    """
    graph = program.forward.graph
    regions = _regions(graph, returned_by(graph)[: len(program.outputs)])
    if not regions:
        return frozenset()
    chosen: set[fx.Node] = set()
    random: set[fx.Node] = set()
    for node in calls_of(graph):
        operands = node.all_input_nodes
        alone = bool(operands) and node.target is not draw and all(operand in random for operand in operands)
        if draws_random_numbers(node) or alone:
            random.add(node)
        elif node in regions and node.target is not counted and not _conversion_kind(node).communicates:
            inside = all(regions.get(user) == regions[node] for user in node.users if user.op != "output")
            if inside and (node.target is not operator.getitem or operands[0] in chosen):
                chosen.add(node)
    return frozenset(chosen)


def within_others(program: Program) -> tuple[Program, frozenset[fx.Node]]:
    """`program` with each saved slice cut out of a window or a whole that is saved too, and the nodes that cut it out.
    (A ReLU's result is kept for its own backward, and the window made from it for that of the next convolution; the sum
    of squares of a norm needs a slice of its operand, and its product the whole.) The slice then has the strides of the
    other, and is copied if not only elementwise operators read it."""
    if program.backward is None:
        return program, frozenset()
    count, forward = len(program.outputs), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    forward.graph_copy(program.forward.graph, copies)
    results = [copies[node] for node in returned_by(program.forward.graph)]
    saved = zip(results[count:], program.backward.graph.find_nodes(op="placeholder"), strict=False)
    # elementwise operators read any strides
    elementwise = {node: all(is_pointwise(user.target) for user in each.users) for node, each in saved}
    kept = {_detached(node): node for node in results[count:]}
    conversions = list(program.conversions)
    replaced, cut = dict[fx.Node, fx.Node](), set[fx.Node]()
    for node in results[count:]:
        if made := _kept_larger(_detached(node), kept):
            cut_out = kept[made[0]]
            for larger in made:
                cut_out = _cut_out_of(cut_out, larger, node, conversions)
                cut.add(cut_out)
            if not elementwise[node] and cut_out.meta["val"].stride() != node.meta["val"].stride():
                cut_out = forward.call_function(
                    torch.ops.aten.clone.default, (cut_out,), {"memory_format": torch.contiguous_format}
                )
                cut_out.meta = dict(node.meta)
                cut.add(cut_out)
            replaced[node] = cut_out
    if not replaced:
        return program, frozenset()
    forward.output((*results[:count], *(replaced.get(node, node) for node in results[count:])))
    return replace(program, conversions=tuple(conversions), forward=Text(program.forward, forward)), frozenset(cut)


def _cut_out_of(whole: fx.Node, larger: fx.Node, node: fx.Node, conversions: list[Conversion]) -> fx.Node:
    """Cut this rank's slice `node` out of `whole`, the result of the conversion `larger` of the slice."""
    _, source, target, axes, size, _ = larger.args
    window = placement_from_code(str(target))
    if isinstance(window, SliceWindow):
        place = place_in(window, own_slice(window))
        assert place is not None
        made = whole.graph.call_function(_slice, (whole, window.dim, place, place + window.cut.width))
        value = whole.meta["val"].narrow(window.dim, place, window.cut.width)
    else:
        gather, tag = conversions[_tag(larger)], len(conversions)
        made = whole.graph.call_function(convert, (whole, target, source, axes, size, tag))
        value = whole.meta["val"].new_empty(larger.all_input_nodes[0].meta["val"].shape)
        conversions.append(
            replace(gather, tag=tag, source=gather.target, target=gather.source, again=True, repeated=False)
        )
    made.meta = {**node.meta, "val": value}
    return made


def _detached(node: fx.Node) -> fx.Node:
    """The value of `node` before autograd detached it to keep it."""
    while is_identity(node):
        node = node.all_input_nodes[0]
    return node


def _kept_larger(node: fx.Node, kept: Collection[fx.Node]) -> list[fx.Node]:
    """The conversions that turn the slice `node` into a window or a whole that is in `kept`, the last one first; empty
    if there are none."""
    for user in node.users:
        if user.target is convert and _holds_its_operand(user):
            if user in kept:
                return [user]
            if further := _kept_larger(user, kept):
                return [*further, user]
    return []


def _holds_its_operand(node: fx.Node) -> bool:
    """Whether the result of the conversion `node` contains its operand, a rank's slice, at one place: in a window, at
    the same place on all ranks; in a whole, only if all slices are full."""
    source, target = (placement_from_code(str(code)) for code in node.args[1:3])
    if isinstance(target, SliceWindow):
        return not target.adds and place_in(target, own_slice(target)) is not None
    return kind(source, target) is Kind.ALL_GATHER and isinstance(source, Shard) and source.cut is None


def _regions(graph: fx.Graph, results: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The region of each node that is in one, except `results`. A node that is computed for the backward only, as
    autograd does with nodes that depend on no gradient, is in the region of its operands."""
    results = set(results)
    live = _needed(list(results), set(graph.nodes))
    inside: dict[fx.Node, int] = {}
    for node in calls_of(graph):
        region = region_of(node)
        if region is None and node not in live:
            region = next((inside[operand] for operand in node.all_input_nodes if operand in inside), None)
        if region is not None:
            inside[node] = region
    return {node: region for node, region in inside.items() if node not in results}


def _tag(node: fx.Node) -> int:
    tag = node.args[TAG]
    assert isinstance(tag, int)
    return tag
