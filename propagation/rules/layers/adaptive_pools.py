"""Adaptive pools, whose windows depend on the size of their input, dim by dim.

A mean to one place is a sum over the dim. If the number of places divides the dim, it is a plain pool. Otherwise the
windows have several sizes and overlap, and the pool is a product with a 0-1 matrix of which element is in which window.
Sums and products have an addend for each part of the dim, so the small result is reduced and the map is not gathered.
"""

from __future__ import annotations

import math
import string
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, operands, shape, value
from ..builder import Builder, Expansion
from ..dims import last_dims_whole
from ..row import Row, RowFunction

aten = torch.ops.aten

_AVERAGE = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
_LARGEST = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}


def _average(b: Builder, node: fx.Node) -> fx.Node | None:
    """Pool each dim in the cheapest of the three ways, those with the smallest result first."""
    x, places = operands(node)[0], argument(node, "output_size")
    if math.prod(shape(x)) == 0:
        return b(aten.reshape.default, x, list(shape(node)))
    first = len(shape(x)) - len(places)
    wanted = dict(enumerate(places, first))
    dims = [d for d, m in wanted.items() if m == 1]
    if dims:
        x = b(aten.div.Scalar, b(aten.sum.dim_IntList, x, dims, True), math.prod(shape(x)[d] for d in dims))
    windows = [shape(x)[d] // m if shape(x)[d] % m == 0 else 1 for d, m in wanted.items()]
    if max(windows) > 1:
        x = b(_AVERAGE[len(places)], x, windows, windows)
    for d, m in wanted.items():
        if shape(x)[d] != m:
            x = _by_matrix(b, x, d, m)
    return x


def _by_matrix(b: Builder, x: fx.Node, dim: int, places: int) -> fx.Node:
    """The means over the windows i of `dim`, from floor(i n / m) to ceil((i + 1) n / m): their sums, by an exact 0-1
    matrix in any dtype, divided by their sizes."""
    size, val = shape(x)[dim], value(x)
    start = b(aten.arange.start_step, 0, places * size, size, device=val.device)  # both in units of 1 / m
    at = b(aten.arange.start_step, 0, places * size, places, device=val.device)
    after = b(aten.sub.Tensor, at, b(aten.unsqueeze.default, start, 1))
    inside = b(aten.logical_and.default, b(aten.gt.Scalar, after, -places), b(aten.lt.Scalar, after, size))
    matrix = b(aten._to_copy.default, inside, dtype=val.dtype)
    letters = string.ascii_lowercase[: len(shape(x))]
    result = letters.replace(letters[dim], "z")
    total = b(aten.einsum.default, f"{letters},z{letters[dim]}->{result}", [x, matrix])
    sizes = b(aten.sum.dim_IntList, matrix, [1])
    return b(aten.div.Tensor, total, b(aten.reshape.default, sizes, [-1, *[1] * (len(shape(x)) - 1 - dim)]))


def _maximum(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...] | None:
    """A plain pool where the places divide every dim, and nothing reads the indices of the maxima."""
    x, places = operands(node)[0], argument(node, "output_size")
    sizes = shape(x)[-len(places) :]
    where = any(item.args[1] == 1 for item in node.users)
    if where or all(m == 1 for m in places) or any(n % m for n, m in zip(sizes, places, strict=True)):
        return None
    windows = [n // m for n, m in zip(sizes, places, strict=True)]
    return (b(_LARGEST[len(places)], x, windows, windows), None)


ROWS: dict[Any, Row | RowFunction] = {
    aten.adaptive_max_pool1d.default: last_dims_whole(1),
    aten.adaptive_max_pool2d.default: last_dims_whole(2),
    aten.adaptive_max_pool3d.default: last_dims_whole(3),
}

EXPANSIONS: dict[Any, Expansion] = {
    aten._adaptive_avg_pool2d.default: _average,
    aten._adaptive_avg_pool3d.default: _average,
    aten.adaptive_avg_pool1d.default: _average,
    aten.adaptive_avg_pool2d.default: _average,
    aten.adaptive_avg_pool3d.default: _average,
    aten.adaptive_max_pool1d.default: _maximum,
    aten.adaptive_max_pool2d.default: _maximum,
    aten.adaptive_max_pool3d.default: _maximum,
}
