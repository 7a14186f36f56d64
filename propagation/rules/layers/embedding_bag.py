"""embedding_bag as lookups and sums, which split along rows, features, indices and bags.

The backward keeps the looked-up rows; PyTorch's operator keeps none.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, operands, shape, value
from ..builder import Builder, Expansion
from ..dims import whole
from ..row import Row, RowFunction

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)


def _bags(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...] | None:
    """None, so that the call stays whole, for the mode "max" with unequal bags or a padding_idx, for sparse or scaled
    gradients, without indices, and where something reads more than the bags."""
    weight, indices, offsets = operands(node)[:3]
    mode, chances = argument(node, "mode"), argument(node, "per_sample_weights")
    padding = argument(node, "padding_idx") if "padding_idx" in argument_names(node) else None
    length = _length(offsets, indices)
    odd = mode == _MAX and (length is None or padding is not None)
    if odd or argument(node, "sparse") or argument(node, "scale_grad_by_freq") or not shape(indices)[0]:
        return None
    if any(user.target is not operator.getitem or user.args[1] for user in node.users):
        return None
    rows = b(aten.embedding.default, weight, indices)
    if chances is not None:
        rows = b(aten.mul.Tensor, rows, b(aten.unsqueeze.default, chances, 1))
    counted = b(aten.ones.default, list(shape(indices)), dtype=value(rows).dtype, device=value(rows).device)
    if padding is not None:
        hidden = b(aten.eq.Scalar, indices, padding % shape(weight)[0])
        rows = b(aten.masked_fill.Scalar, rows, b(aten.unsqueeze.default, hidden, 1), 0.0)
        counted = b(aten.masked_fill.Scalar, counted, hidden, 0.0)
    if argument(node, "include_last_offset"):
        offsets = b(aten.slice.Tensor, offsets, 0, 0, shape(offsets)[0] - 1)
    if mode == _MAX:
        return (b(operator.getitem, b(aten.max.dim, _stacked(b, rows, length), 1), 0), None, None, None)
    bags = _summed(b, rows, offsets, length)
    if mode == _MEAN:
        counts = b(aten.clamp.default, _summed(b, counted, offsets, length), 1)
        bags = b(aten.div.Tensor, bags, b(aten.unsqueeze.default, counts, 1))
    return (bags, None, None, None)


def _length(offsets: fx.Node, indices: fx.Node) -> int | None:
    """The common length of all bags, or None."""
    if offsets.target is not aten.arange.start_step:
        return None
    start, stop, *step = offsets.args
    return step[0] if (start, stop) == (0, shape(indices)[0]) and step else None  # type: ignore[return-value]


def _stacked(b: Builder, rows: fx.Node, length: int | None) -> fx.Node:
    """Rows of bags of equal length as [bags, length, ...]."""
    assert length is not None
    count, *rest = shape(rows)
    return b(aten.reshape.default, rows, [count // length, length, *rest])


def _summed(b: Builder, rows: fx.Node, offsets: fx.Node, length: int | None) -> fx.Node:
    """The sum of the rows of each bag."""
    if length is not None:
        return b(aten.sum.dim_IntList, _stacked(b, rows, length), [1])
    count, device = shape(rows)[0], value(rows).device
    begun = b(aten.zeros.default, [count + 1], dtype=torch.int64, device=device)
    one = b(aten.ones.default, list(shape(offsets)), dtype=torch.int64, device=device)
    begun = b(aten.slice.Tensor, b(aten.index_add.default, begun, 0, offsets, one), 0, 0, count)
    bag = b(aten.sub.Tensor, b(aten.cumsum.default, begun, 0), 1)
    none = b(aten.zeros.default, [*shape(offsets), *shape(rows)[1:]], dtype=value(rows).dtype, device=device)
    return b(aten.index_add.default, none, 0, bag, rows)


ROWS: dict[Any, Row | RowFunction] = {
    aten.embedding_bag.default: whole,
    aten.embedding_bag.padding_idx: whole,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten.embedding_bag.default: _bags,
    aten.embedding_bag.padding_idx: _bags,
}
