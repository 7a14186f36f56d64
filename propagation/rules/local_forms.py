"""Helpers that the local forms of many families share.

A local form, the calls that a rank runs in place of a global one, takes an `Emitter` (`rule.py`) and the arguments of
the call with the local operands, and returns the node of the local result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph.nodes import argument, argument_names
from ..ops.by_rank import of_rank, part_slice
from .rule import Emitter, Localize
from .windows import Spread

aten = torch.ops.aten


def replaced(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], **values: Any) -> tuple[Any, Any]:
    """The arguments of a call with `values` in place of those of the same names."""
    names = argument_names(node)
    every = {**dict(zip(names, args, strict=False)), **kwargs, **values}
    count = max([len(args), *(names.index(name) + 1 for name in values)])
    for name in names[:count]:
        every.setdefault(name, argument(node, name))
    return tuple(every[name] for name in names[:count]), {k: every[k] for k in kwargs if k not in names[:count]}


def split_dims(emit: Emitter) -> dict[int, str]:
    """The dims of the first operand along which a rank has a window, with their factors."""
    return {window.dim: factor for (_, factor), window in emit.windows.items()}


def constants(
    emit: Emitter, like: fx.Node, factor: str, rows: Sequence[Sequence[float]], dtype: torch.dtype
) -> fx.Node:
    """The rank's row of `rows`, which has one for each part of `factor`, on the device of `like`."""
    flat = [float(number) for row in rows for number in row]
    like = emit.call(aten.detach.default, like)  # constants have no gradient
    return emit.call(of_rank, like, emit.position(factor), flat, len(rows[0]), dtype)


def cropped(emit: Emitter, x: fx.Node, dim: int, factor: str, starts: Sequence[int], length: int) -> fx.Node:
    """`length` elements of `x` along `dim`, from the start in `starts` of the rank's part of `factor`."""
    if len(set(starts)) == 1:
        return emit.call(aten.slice.Tensor, x, dim, starts[0], starts[0] + length)
    return emit.call(part_slice, x, emit.position(factor), dim, list(starts), length)


def spatial_dims(emit: Emitter, count: int) -> set[int]:
    """Those of the last `count` dims along which a rank has windows, counted from the first of them."""
    return {dim - (len(emit.whole[0]) - count) for dim in split_dims(emit)}


def own_part(emit: Emitter, whole: fx.Node, dim: int, factor: str, spread: Spread) -> fx.Node:
    """The rank's slice of `factor`, out of the range `whole` over which its window was spread."""
    cut = emit.cut(factor)
    places = [spread.place(start) if start < stop else None for start, stop in cut.spans]
    known = next(place for place in places if place is not None)
    return cropped(emit, whole, dim, factor, [known if place is None else place for place in places], cut.width)


def with_local_shape(position: int) -> Localize:
    """The operator itself, with the local shape of the result as its argument at `position`."""

    def local(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        size = list(emit.shapes.results[0])
        return emit.call(emit.node.target, *args[:position], size, *args[position + 1 :], **kwargs)

    return local
