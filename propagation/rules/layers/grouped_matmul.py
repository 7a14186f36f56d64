"""Consecutive groups of a matrix's rows: each multiplied by its own matrix, or each row with a value of its group.

`offsets` holds the end of each group. A rank with a part of the rows has the part of each group that lies in it. A rank
with a part of the matrices (the experts of a model) computes the rows of their groups, and zeros for the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, operands, shape
from ...ops.by_rank import others_rows, part_slice
from ...ops.experts import grouped_matmul, per_expert
from ..dims import whole
from ..local_forms import constants
from ..row import Row, RowFunction, parse_row
from ..rule import Emitter, Rule

aten = torch.ops.aten


def grouped_mm(node: fx.Node) -> Rule | None:
    """Rows and matrices, or two batches of matrices; other forms stay whole."""
    x, weight = operands(node)[:2]
    has_bias = node.target is aten._grouped_mm.default and argument(node, "bias") is not None
    if has_bias or (len(shape(x)), len(shape(weight))) not in ((2, 3), (3, 3)):
        return whole(node)
    if len(shape(x)) == 3:
        row = Row("e m k, e k n -> e m n", reduce="k", linear=("0", "1"), contraction=True)
        return parse_row(row, node)
    row = Row("t k, e k n, 1 -> t n", reduce="e k", linear=("0", "1"), local=_local_groups)
    rule = parse_row(row, node)
    return replace(
        rule, flops=2.0 * shape(x)[0] * shape(weight)[1] * shape(weight)[2], even=frozenset("te"), experts="e"
    )


def _local_groups(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, weight, offsets, *rest = args
    offsets = _own_ends(emit, offsets)
    if "e" not in emit.split:
        return emit.call(emit.node.target, x, weight, offsets, *rest, **kwargs)
    return _own_groups(emit, x, weight, offsets, rest, kwargs)


def _own_ends(emit: Emitter, offsets: fx.Node) -> fx.Node:
    """The ends of the parts of groups that lie in a rank's part of the rows."""
    if "t" not in emit.split:
        return offsets
    cut = emit.cut("t")
    starts = constants(emit, offsets, "t", [[start] for start, _ in cut.spans], torch.int32)
    return emit.call(aten.clamp.default, emit.call(aten.sub.Tensor, offsets, starts), 0, cut.width)


def _per_expert(node: fx.Node) -> Rule:
    row = Row("e d, 1, t 1 -> t d", linear=("0",), local=_local_values, even=True)
    return replace(parse_row(row, node), experts="e")


def _local_values(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, offsets, rows = args
    return emit.call(per_expert, x, _own_ends(emit, offsets), rows)


def _own_groups(
    emit: Emitter, x: fx.Node, weight: fx.Node, offsets: fx.Node, rest: list[Any], kwargs: dict[str, Any]
) -> fx.Node:
    """Multiply the rank's own groups. The kernel leaves rows after the last group unwritten, in the result and in the
    gradient, so both are masked."""
    place, width = emit.position("e"), emit.shapes.operands[1][0]
    hidden = emit.call(others_rows, offsets, place, width, emit.shapes.operands[0][0])
    own = emit.call(part_slice, offsets, place, 0, emit.bounds("e")[:-1], width)
    x = emit.call(aten.masked_fill.Scalar, x, hidden, 0.0)
    product = emit.call(emit.node.target, x, weight, own, *rest, **kwargs)
    return emit.call(aten.masked_fill.Scalar, product, hidden, 0.0)


ROWS: dict[Any, Row | RowFunction] = {
    aten._grouped_mm.default: grouped_mm,
    grouped_matmul: grouped_mm,
    per_expert: _per_expert,
}
