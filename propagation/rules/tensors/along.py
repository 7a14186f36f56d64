"""Operators that work along some dims, which stay whole, while the others are independent: sorting, cumulative sums,
softmax, quantiles, diagonals, and writes into a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, operands, shape, value
from ..builder import Builder, Expansion
from ..dims import along, letters_of, sizes_of, unsplit, whole_dims, without
from ..row import Row, RowFunction
from ..rule import Dims, Rule

aten = torch.ops.aten


def _quantile_rule(node: fx.Node) -> Rule:
    """quantile, nanquantile: of one dim, or of all elements; several quantiles are in a new first dim."""
    x, *fractions = operands(node)
    size, dim, keep = shape(x), argument(node, "dim"), argument(node, "keepdim")
    worked_along = whole_dims(node, ("dim",), len(size))
    letters = without(letters_of(size), worked_along)
    several = len(shape(fractions[0])) if fractions else 0
    kept = letters if keep else tuple(parts for d, parts in enumerate(letters) if d not in worked_along)
    out = ((),) * several + (kept if dim is not None or keep else ())
    return Rule((letters, *map(unsplit, fractions)), (out,), sizes_of(letters, size), fill=0.0)


def _searchsorted_rule(node: fx.Node) -> Rule | None:
    """searchsorted and bucketize: the places of independent values in a sorted last dim, which stays whole. There is
    one sorted sequence for all values, or one for each leading index."""
    x = argument(node, "self")
    if not isinstance(x, fx.Node):
        return None
    letters = letters_of(shape(x))

    def dims(operand: fx.Node) -> Dims:
        count = len(shape(operand))
        return ((),) if count == 1 else (*letters[: count - 1], ())

    arguments = {name: argument(node, name) for name in argument_names(node)}
    tensors = tuple(letters if name == "self" else dims(o) for name, o in arguments.items() if isinstance(o, fx.Node))
    # in the padding of an uneven shard a value may be any number, even NaN
    return Rule(tensors, (letters,), sizes_of(letters, shape(x)), fill=0.0)


def _members_rule(node: fx.Node) -> Rule:
    """isin: elements are independent, and see all test elements."""
    elements, *tests = operands(node)
    letters = letters_of(shape(elements))
    return Rule((letters, *map(unsplit, tests)), (letters,), sizes_of(letters, shape(elements)))


def _triangle_rule(node: fx.Node) -> Rule | None:
    """tril, triu: the place of an element in the last two dims, which stay whole, decides whether it is kept."""
    size = shape(node)
    letters = without(letters_of(size), range(len(size) - 2, len(size)))
    return Rule((letters,), (letters,), sizes_of(letters, size), linear=(frozenset({0}),))


def _expand_write_into_slice(b: Builder, node: fx.Node) -> fx.Node | None:
    """A write into a slice of a complex tensor, which has no derivative in PyTorch, as a write of real and imaginary
    parts."""
    x, source = operands(node)
    if not value(x).is_complex():
        return None
    where = [argument(node, name) for name in argument_names(node)[3:]]
    dim = argument(node, "dim") % len(shape(x))
    parts = [b(aten.view_as_real.default, b.cast(part, value(x).dtype)) for part in (x, source)]
    return b(aten.view_as_complex.default, b(node.target, *parts, dim, *where))


ROWS: dict[Any, Row | RowFunction] = {
    aten._safe_softmax.default: along("dim"),
    aten._softmax.default: along("dim"),
    aten._softmax_backward_data.default: along("dim"),
    aten.aminmax.default: along("dim"),
    aten.argmax.default: along("dim"),
    aten.argmin.default: along("dim"),
    aten.bucketize.Tensor: _searchsorted_rule,
    aten.cummax.default: along("dim"),
    aten.cummin.default: along("dim"),
    aten.cumprod.default: along("dim"),
    aten.cumsum.default: along("dim", linear=True),
    aten.diagonal.default: along("dim1", "dim2", linear=True),
    aten.diagonal_scatter.default: along("dim1", "dim2", linear=True),
    aten.flip.default: along("dims", linear=True),
    aten.glu.default: along("dim"),
    aten.isin.Tensor_Scalar: _members_rule,
    aten.isin.Tensor_Tensor: _members_rule,
    aten.kthvalue.default: along("dim"),
    aten.log_softmax.int: along("dim"),
    aten.logcumsumexp.default: along("dim"),
    aten.max.dim: along("dim"),
    aten.median.default: along(),
    aten.median.dim: along("dim"),
    aten.min.dim: along("dim"),
    aten.mode.default: along("dim"),
    aten.nanmedian.default: along(),
    aten.nanmedian.dim: along("dim"),
    aten.nanquantile.default: _quantile_rule,
    aten.nanquantile.scalar: _quantile_rule,
    aten.quantile.default: _quantile_rule,
    aten.quantile.scalar: _quantile_rule,
    aten.searchsorted.Tensor: _searchsorted_rule,
    aten.select_scatter.default: along("dim", linear=True),
    aten.slice_scatter.default: along("dim", linear=True),
    aten.softmax.int: along("dim"),
    aten.sort.default: along("dim"),
    aten.sort.stable: along("dim"),
    aten.topk.default: along("dim"),
    aten.tril.default: _triangle_rule,
    aten.triu.default: _triangle_rule,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten.select_scatter.default: _expand_write_into_slice,
    aten.slice_scatter.default: _expand_write_into_slice,
}
