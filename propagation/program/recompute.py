"""Values of the forward that the backward computes again in place of keeping them.

`recompute` is the mechanism; three functions say what is worth it:

    planned            what the plan says: memory/keeping.py
    checkpointed       what torch.utils.checkpoint was called for: activations
    within_others      slices of which a window, or the whole, is kept too: they are a part of it
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
from ..graph.nodes import draws_random_numbers, is_pointwise, is_view, region_of
from ..graph.origins import compute_again, computed_again
from ..ops.collectives import convert, kind_of
from ..ops.random_numbers import draw
from ..rules.windows import own_slice, place_in
from .local_program import Conversion
from .step import Step, calls_of, returned_by, undo_views

_slice = torch.ops.aten.slice.Tensor
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def recompute(step: Step, chosen: Collection[fx.Node]) -> Step:
    """`step` with those of its saved values that are in `chosen`, nodes of its forward, computed again in the
    backward, each right before its first use.

    They are computed of what `chosen` does not hold: of inputs, and of values that are saved for it. A conversion that
    runs again has an entry of its own among the program's, `again`.
    """
    count = len(step.program.outputs)
    saved = returned_by(step.forward.graph)[count:]
    again = _needed([node for node in saved if node in chosen], chosen)
    if step.backward is None or not any(node in again for node in saved):
        return step
    place = {node: i for i, node in enumerate(step.forward.graph.nodes)}
    leaves = {operand for node in again for operand in node.all_input_nodes if operand not in again}
    kept = list(dict.fromkeys([*(s for s in saved if s not in again), *sorted(leaves, key=place.__getitem__)]))

    results = returned_by(step.forward.graph)[:count]
    forward = _computing((*results, *kept), step.forward.graph)

    backward, conversions = fx.Graph(), list(step.program.conversions)
    placeholders = step.backward.graph.find_nodes(op="placeholder")
    stands_for = dict(zip(placeholders, saved, strict=False))
    standing = dict(zip(saved, placeholders, strict=False))
    values = {node: _placeholder_like(backward, standing.get(node, node)) for node in kept}
    env = {node: _placeholder_like(backward, node) for node in placeholders[len(saved) :]}

    def value(node: fx.Node) -> fx.Node:
        if node in stands_for and node not in env:
            for missing in sorted(_needed([stands_for[node]], again, values), key=place.__getitem__):
                if _is_its_operand(missing):
                    values[missing] = values[missing.all_input_nodes[0]]
                    continue
                values[missing] = backward.node_copy(missing, values.__getitem__)
                compute_again(values[missing], True)
                if missing.target is convert:
                    values[missing].args = (*values[missing].args[:-1], len(conversions))
                    conversions.append(_once_more(conversions, missing, len(conversions)))
            env[node] = values[stands_for[node]]
        return env[node]

    for node in calls_of(step.backward.graph):
        for operand in node.all_input_nodes:
            value(operand)
        env[node] = backward.node_copy(node, env.__getitem__)
    returned = returned_by(step.backward.graph)
    backward.output(tuple(None if node is None else value(node) for node in returned))
    undo_views(backward)
    constants = {
        str(node.target): getattr(module, str(node.target))
        for module in (step.forward, step.backward)
        for node in module.graph.find_nodes(op="get_attr")
    }
    return replace(
        step,
        program=replace(step.program, conversions=tuple(conversions)),
        forward=Text(constants, forward),
        backward=Text(constants, backward),
    )


def _needed(wanted: list[fx.Node], chosen: Collection[fx.Node], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """What is computed to have `wanted`: they, and of their operands, and so on, those in `chosen` that are not in
    `known`. A constant is had anywhere."""
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
    """A graph of all inputs of `graph` that returns `wanted`, with what computes it and nothing else."""
    live = _needed([*wanted, *graph.find_nodes(op="placeholder")], set(graph.nodes))
    computing, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in live:
            copies[node] = computing.node_copy(node, copies.__getitem__)
    computing.output(tuple(copies[node] for node in wanted))
    return computing


def _placeholder_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.target = placeholder.name  # an argument of the graph's function, so it must be unlike the others too
    placeholder.meta = dict(node.meta)
    if placeholder.meta["val"].requires_grad:  # an input of the forward; of a backward nothing is differentiated
        placeholder.meta["val"] = placeholder.meta["val"].detach()
    return placeholder


def _once_more(conversions: list[Conversion], node: fx.Node, tag: int) -> Conversion:
    """What the program's list says of the conversion `node` when it runs again."""
    return replace(conversions[_tag(node)], tag=tag, again=True)


def planned(step: Step) -> frozenset[fx.Node]:
    """What the plan has the backward compute again, in the forward of `step`; and what it takes nothing to have again
    wherever it is: views, and elementwise operators that only the backward reads, or whose operands are constants."""
    graph = step.forward.graph
    live = _needed(list(returned_by(graph)[: len(step.program.outputs)]), set(graph.nodes))
    chosen: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    for node in calls_of(graph):
        if all(operand in constant or operand.op == "get_attr" for operand in node.all_input_nodes):
            constant.add(node)
        if node.target is operator.getitem:
            again = node.all_input_nodes[0] in chosen
        elif draws_random_numbers(node):
            again = False
        elif node.target is convert:
            again = computed_again(node) is True
        else:
            free = is_view(node) or (is_pointwise(node.target) and (node in constant or node not in live))
            again = free if (noted := computed_again(node)) is None else noted or is_view(node)
        if again:
            chosen.add(node)
    return frozenset(chosen - _as_large_as_its_operand(step, chosen, live))


def _as_large_as_its_operand(step: Step, chosen: Collection[fx.Node], live: Collection[fx.Node]) -> set[fx.Node]:
    """Those of `chosen` that are computed of a value that would be kept for that alone, and is as large: a ReLU of what
    a norm gives. (A plan says of all results of an operator at once whether they are kept.) `live`: what the forward
    computes for itself."""
    saved = dict.fromkeys(map(_detached, returned_by(step.forward.graph)[len(step.program.outputs) :]))
    again = [node for node in saved if node in chosen]
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in again:
        needed = _needed([node], chosen)
        for leaf in {operand for each in needed for operand in each.all_input_nodes if operand not in needed}:
            readers.setdefault(leaf, []).append(node)
    return {
        node
        for leaf, (node, *more) in readers.items()
        if not more and node in live and not is_view(node) and leaf.op == "call_function" and leaf not in saved
        and leaf.target is not convert and _bytes(leaf) >= _bytes(node) > 0
    }  # fmt: skip


def _bytes(node: fx.Node) -> int:
    """The bytes of a tensor, 0 of what is none."""
    return int(getattr(node.meta["val"], "nbytes", 0))


def _conversion_kind(node: fx.Node) -> Kind:
    if node.target is not convert:
        return Kind.NOTHING
    _, source, target, *_ = node.args
    return kind_of(str(source), str(target))


def checkpointed(step: Step) -> frozenset[fx.Node]:
    """What the forward of `step` computes inside calls of torch.utils.checkpoint, less what is kept:

    what others read     the results of a region, which other regions start from
    random numbers       what torch's generator draws, and what follows from that alone: to draw again would give
                         other numbers (of a key they are the same again)
    collectives          what they give, so that none runs twice unasked
    """
    graph = step.forward.graph
    regions = _regions(graph, returned_by(graph)[: len(step.program.outputs)])
    chosen: set[fx.Node] = set()
    random: set[fx.Node] = set()
    for node in calls_of(graph):
        operands = node.all_input_nodes
        alone = bool(operands) and node.target is not draw and all(operand in random for operand in operands)
        if draws_random_numbers(node) or alone:
            random.add(node)
        elif node in regions and not _conversion_kind(node).communicates:
            inside = all(regions.get(user) == regions[node] for user in node.users if user.op != "output")
            if inside and (node.target is not operator.getitem or operands[0] in chosen):
                chosen.add(node)
    return frozenset(chosen)


def within_others(step: Step) -> tuple[Step, frozenset[fx.Node]]:
    """`step` with each saved slice of which a window or the whole is saved too taken out of that, and these nodes. (A
    ReLU's result is kept for its own backward, and the window made of it for that of the convolution behind it; of what
    a norm reads its sum of squares needs a slice, and its product the whole.) It has the strides of the other then, and
    is copied where something else than elementwise operators reads it."""
    if step.backward is None:
        return step, frozenset()
    count, forward = len(step.program.outputs), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    forward.graph_copy(step.forward.graph, copies)
    results = [copies[node] for node in returned_by(step.forward.graph)]
    saved = zip(results[count:], step.backward.graph.find_nodes(op="placeholder"), strict=False)
    # what is elementwise reads any strides
    elementwise = {node: all(is_pointwise(user.target) for user in each.users) for node, each in saved}
    kept = {_detached(node): node for node in results[count:]}
    conversions = list(step.program.conversions)
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
        return step, frozenset()
    forward.output((*results[:count], *(replaced.get(node, node) for node in results[count:])))
    program = replace(step.program, conversions=tuple(conversions))
    return replace(step, program=program, forward=Text(step.forward, forward)), frozenset(cut)


def _cut_out_of(whole: fx.Node, larger: fx.Node, node: fx.Node, conversions: list[Conversion]) -> fx.Node:
    """This rank's slice, which `node` is, of `whole`: of what the conversion `larger` made of it."""
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


def _is_its_operand(node: fx.Node) -> bool:
    """Whether `node` is the tensor that it is called for."""
    return node.target in _SAME or (node.target is convert and _conversion_kind(node) is Kind.NOTHING)


def _detached(node: fx.Node) -> fx.Node:
    """The value that `node` is, which autograd detaches to keep it."""
    while _is_its_operand(node):
        node = node.all_input_nodes[0]
    return node


def _kept_larger(node: fx.Node, kept: Collection[fx.Node]) -> list[fx.Node]:
    """The conversions that make of the slice `node` a window, or the whole, that is in `kept`, the last one first;
    none, if none does."""
    for user in node.users:
        if user.target is convert and _holds_its_operand(user):
            if user in kept:
                return [user]
            if further := _kept_larger(user, kept):
                return [*further, user]
    return []


def _holds_its_operand(node: fx.Node) -> bool:
    """Whether what the conversion `node` gives has a rank's slice, its operand, at one place: of a window that place is
    the same on all ranks; of a whole all slices are full."""
    source, target = (placement_from_code(str(code)) for code in node.args[1:3])
    if isinstance(target, SliceWindow):
        return not target.adds and place_in(target, own_slice(target)) is not None
    return kind(source, target) is Kind.ALL_GATHER and isinstance(source, Shard) and source.cut is None


def _regions(graph: fx.Graph, results: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The region of each node that is in one, the `results` aside. What is computed for the backward only, as autograd
    does with what depends on no gradient, is in the region of its operands."""
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
    tag = node.args[-1]
    assert isinstance(tag, int)
    return tag
