"""Programs whose tensors have sizes that are known only at run time: the rows of a mixture of experts.

A program is lowered and traced twice, for two numbers of rows. Arguments that differ between the two are such sizes;
each is replaced by the size of a tensor that the rank has by then. For example, the gradient of a sum over features is
expanded to 17 rows in the one, and to 18 in the other:

    expand(g, [17, 8])    expand(g, [18, 8])    becomes    expand(g, [sym_size(rows, 0), 8])

Two mixtures may expect equally many rows and get different ones, so the tensor is an operand of the call, or one that
is computed with its result: such tensors have one number of rows, up to an operator that makes rows of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from ...strategy.errors import VerifyError
from ..graph.nodes import inherit, mark, note_unsized, operator_name, region_of
from ..ops.collectives import convert
from ..ops.experts import arrival, parted, route, route_once, take_rows, take_weights

size_of = torch.ops.aten.sym_size.int
EXPECTING = (route, route_once, parted, arrival)  # they take a number of rows for planning, and ignore it when they run
_MAKING = (
    convert,
    route,
    route_once,
    parted,
    take_rows,
    take_weights,
)  # their results have other rows than their operands
_Sizes = tuple[int, int]  # of one dim, in the two traces


def free_sizes(one: fx.Graph, other: fx.Graph) -> None:
    """Replace, in `one`, sizes that differ from those of `other`, the same graph for another number of rows. Both have
    their local values. Raises VerifyError if a number is no size of a tensor that belongs to it."""
    nodes, twins = list(one.nodes), list(other.nodes)
    if len(nodes) != len(twins):
        raise VerifyError(f"a graph has {len(nodes)} or {len(twins)} nodes, depending on a number of rows")
    place = {node: i for i, node in enumerate(nodes)}
    sizes = {node: dict(_sizes(node, twin)) for node, twin in zip(nodes, twins, strict=True)}
    for node, twin in zip(nodes, twins, strict=True):
        if node.op != "call_function":
            continue
        if node.target is not twin.target:
            raise VerifyError(f"{node.format_node()} depends on a number of rows")
        if node.target not in EXPECTING:
            node.args, node.kwargs = _replaced(node, twin, sizes, place)


def _replaced(
    node: fx.Node, twin: fx.Node, sizes: Mapping[fx.Node, Mapping[int, _Sizes]], place: Mapping[fx.Node, int]
) -> tuple[Any, Any]:
    numbers = iter(_leaves((twin.args, twin.kwargs)))

    def sized(leaf: Any) -> Any:
        number = next(numbers)
        if type(leaf) is not int or leaf == number:
            return leaf
        found = next(_with_size(node, (leaf, number), sizes, place), None)
        if found is None:
            raise VerifyError(
                f"{operator_name(node)} {node.name} takes {leaf}, which depends on a number of rows of experts, and is "
                "no size of a tensor that belongs to it"
            )
        with node.graph.inserting_before(node):
            size = node.graph.call_function(size_of, found)
        size.meta["val"] = leaf
        inherit(size, node)
        mark(size, region_of(node))
        return size

    replaced: Any = map_aggregate((node.args, node.kwargs), sized)
    args, kwargs = replaced
    return args, kwargs


def _with_size(
    node: fx.Node, wanted: _Sizes, sizes: Mapping[fx.Node, Mapping[int, _Sizes]], place: Mapping[fx.Node, int]
) -> Iterator[tuple[fx.Node, int]]:
    """The tensors before `node`, each with a dim, that have the size `wanted` and belong to it, the nearest first."""
    queue, seen = deque([node]), {node}
    while queue:
        reader = queue.popleft()
        if reader is node or reader.target not in _MAKING:
            for operand in reader.all_input_nodes:
                if place.get(operand, len(place)) < place[node]:
                    yield from ((operand, dim) for dim, both in sizes[operand].items() if both == wanted)
            following = [user for user in reader.users if user not in seen and user.op != "output"]
            seen.update(following)
            queue.extend(following)


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return leaves


def _sizes(node: fx.Node, twin: fx.Node) -> Iterator[tuple[int, _Sizes]]:
    """The dims of the value of a node with two sizes. Notes that it has some."""
    val, other = node.meta.get("val"), twin.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(other, torch.Tensor):
        return
    differ = tuple(dim for dim, both in enumerate(zip(val.shape, other.shape, strict=True)) if both[0] != both[1])
    if differ:
        note_unsized(node, differ, val.layout is torch.strided and val.stride() != other.stride())
    yield from ((dim, (val.shape[dim], other.shape[dim])) for dim in differ)
