"""Pools, unfold and fold: operators on a neighbourhood of each element.

Like convolutions they read windows (`windows.py`). On a window, which is already padded, the operator runs without
padding; indices are then translated to the whole image, and means are scaled to divide by PyTorch's counts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, operands, per_dim, results_of, shape, value
from ...ops.dtypes import wide
from ..dims import last_dims_whole, over_dims
from ..local_forms import constants, own_part, replaced, spatial_dims, split_dims
from ..row import Row, RowFunction
from ..rule import Dims, Emitter, Rule
from ..windows import Halo, Reach, Spread, Strided, WholeRows

aten = torch.ops.aten


def max_pool(node: fx.Node) -> Rule:
    """Max pools; the padding beyond the ends is less than any element."""
    tensor, beyond = results_of(node)[0], any(_pool_sizes(node)[2]) or argument(node, "ceil_mode")
    least = -math.inf if tensor.dtype.is_floating_point else float(torch.iinfo(tensor.dtype).min)
    return over_dims(node, _pool_reaches(node), least if beyond else 0.0, linear=False, local=_local_max_pool)


def _count(node: fx.Node) -> int:
    """The number of dims that an operator works along, from its name."""
    return next(int(letter) for letter in str(node.target) if letter.isdigit())


def _pool_reaches(node: fx.Node) -> dict[int, Reach]:
    kernel, strides, paddings, dilations = _pool_sizes(node)
    first = len(shape(operands(node)[0])) - len(kernel)
    every = zip(kernel, strides, paddings, dilations, strict=True)
    return {
        first + d: Strided(dilation * (extent - 1) + 1, stride, padding)
        for d, (extent, stride, padding, dilation) in enumerate(every)
    }


def _pool_sizes(node: fx.Node) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride, padding and dilation of a pool for each dim."""
    count = _count(node)
    kernel = per_dim(argument(node, "kernel_size"), count)
    stride = argument(node, "stride")
    dilation = argument(node, "dilation") if "dilation" in argument_names(node) else 1
    return (
        kernel,
        per_dim(stride, count) if stride not in (None, []) else kernel,
        per_dim(argument(node, "padding"), count),
        per_dim(dilation, count),
    )


def _without_padding(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator itself on windows, which are already padded; its `padding` is for the last dims."""
    count = _count(emit.node)
    split = spatial_dims(emit, count)
    if split:
        padding = [0 if d in split else n for d, n in enumerate(per_dim(argument(emit.node, "padding"), count))]
        args, kwargs = replaced(emit.node, args, kwargs, padding=padding)
    return emit.call(emit.node.target, *args, **kwargs)


def _local_max_pool(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | tuple[fx.Node, ...]:
    """The local pool; indices, which some pools return, are those of the whole image."""
    pooled = _without_padding(emit, args, kwargs)
    if not emit.windows or len(results_of(emit.node)) == 1:
        return pooled
    largest, index = (emit.call(operator.getitem, pooled, i) for i in range(2))
    return largest, _global_index(emit, index)


def _global_index(emit: Emitter, index: fx.Node) -> fx.Node:
    """Translate flat indices into the window to flat indices into the whole image."""
    whole, windows = emit.whole[0], {window.dim: (f, window) for (_, f), window in emit.windows.items()}
    first = len(whole) - _count(emit.node)
    total: fx.Node | None = None
    for dim in reversed(range(first, len(whole))):
        here, width = index, windows[dim][1].width if dim in windows else whole[dim]
        if dim > first:
            here = emit.call(aten.remainder.Scalar, index, width)
            index = emit.call(aten.floor_divide.Scalar, index, width)
        if dim in windows:
            factor, window = windows[dim]
            begins = constants(emit, index, factor, [span[:1] for span in window.spans], torch.int64)
            here = emit.call(aten.add.Tensor, here, begins)
        here = emit.call(aten.mul.Scalar, here, math.prod(whole[dim + 1 :]))
        total = here if total is None else emit.call(aten.add.Tensor, total, here)
    assert total is not None
    return total


def avg_pool(node: fx.Node) -> Rule:
    """Average pools, with PyTorch's divisors. A mean of integers is rounded: it is not a sum of the means of addends,
    and near the ends no factor turns one mean into another."""
    reaches = _pool_reaches(node)
    if value(node).dtype.is_floating_point:
        return over_dims(node, reaches, local=_local_avg_pool)
    return over_dims(node, reaches, linear=False, whole=reaches)


def _local_avg_pool(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """On a window each mean is over a full kernel; rescale those near the ends, where PyTorch may divide by less."""
    means = _without_padding(emit, args, kwargs)
    node = emit.node
    if "divisor_override" in argument_names(node) and argument(node, "divisor_override") is not None:
        return means
    first, dtype = len(emit.whole[0]) - _count(node), value(node).dtype
    for dim, factor in split_dims(emit).items():
        kernel, stride, padding, _ = (sizes[dim - first] for sizes in _pool_sizes(node))
        cut, size, rows = emit.cut(factor), emit.whole[0][dim], []
        for begin, end in cut.spans:
            row = [1.0] * cut.width
            for i in range(begin, end):
                start = i * stride - padding
                stop = min(start + kernel, size + padding)
                counted = stop - start if argument(node, "count_include_pad") else min(stop, size) - max(start, 0)
                row[i - begin] = kernel / counted
            rows.append(row)
        if any(number != 1.0 for row in rows for number in row):
            factors = constants(emit, means, factor, rows, wide(dtype))
            around = [cut.width if d == dim else 1 for d in range(len(emit.whole[0]))]
            means = emit.call(aten.mul.Tensor, means, emit.call(aten.reshape.default, factors, around))
            if wide(dtype) != dtype:
                means = emit.call(aten._to_copy.default, means, dtype=dtype)
    return means


# -- Blocks


def im2col(node: fx.Node) -> Rule:
    """unfold: blocks of an image become columns; the dim of blocks merges their rows and columns. Rows split; columns
    split if there is one row of blocks."""
    size = shape(operands(node)[0])
    blocks = _blocks(node, size[-2:])
    dim = 1 if blocks[0] == 1 else 0
    factor: tuple[str, ...] = () if 1 in (size[-2:][dim], blocks[dim]) else (f"s{dim}",)
    merged = (*factor, "columns") if factor and dim == 0 and blocks[1] > 1 else factor
    lead: Dims = (("b",),) if len(size) == 4 else ()
    space: Dims = tuple(factor if d == dim else () for d in range(2))
    sizes = ({"b": size[0]} if lead else {}) | {"c": size[-3]} | dict.fromkeys(factor, blocks[dim])
    return Rule(
        ((*lead, ("c",), *space),),
        ((*lead, ("c",), merged),),
        sizes,
        linear=(frozenset({0}),),
        even=frozenset("c"),
        windows=tuple(Halo(0, f, Strided(*_block_sizes(node)[dim])) for f in factor),
        local=_local_im2col,
    )


def _block_sizes(node: fx.Node) -> list[tuple[int, int, int]]:
    """The extent of a block, the stride and the padding of im2col or col2im, for each dim."""
    kernel, strides, paddings, dilations = (
        per_dim(argument(node, name), 2) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    return [(dilations[d] * (kernel[d] - 1) + 1, strides[d], paddings[d]) for d in range(2)]


def _blocks(node: fx.Node, image: Sequence[int]) -> list[int]:
    """The number of blocks that im2col makes of `image` along each dim."""
    every = zip(image, _block_sizes(node), strict=True)
    return [(size + 2 * padding - extent) // stride + 1 for size, (extent, stride, padding) in every]


def _local_im2col(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return _without_padding(emit, args, kwargs)


def col2im(node: fx.Node) -> Rule:
    """fold: adds columns up at the places of their blocks in an image. The rows of the image split, whose reach in the
    merged dim of blocks is whole rows of blocks; columns split if there is one row of blocks."""
    (columns,), image = operands(node), [int(n) for n in argument(node, "output_size")]
    size, (dim, reach) = shape(columns), _folded(node, image)
    factor: tuple[str, ...] = () if 1 in (size[-1], image[dim]) else (f"s{dim}",)
    lead: Dims = (("b",),) if len(size) == 3 else ()
    space: Dims = tuple(factor if d == dim else () for d in range(2))
    sizes = ({"b": size[0]} if lead else {}) | {"c": shape(node)[-3]} | dict.fromkeys(factor, image[dim])
    return Rule(
        ((*lead, ("c",), factor),),
        ((*lead, ("c",), *space),),
        sizes,
        linear=(frozenset({0}),),
        even=frozenset("c"),
        windows=tuple(Halo(0, f, reach) for f in factor),
        local=_local_col2im,
    )


def _folded(node: fx.Node, image: Sequence[int]) -> tuple[int, WholeRows]:
    """The dim of col2im's image that can be split, and the reach of its slices among the blocks."""
    rows, columns = _blocks(node, image)
    dim = 1 if rows == 1 else 0
    return dim, WholeRows(Spread(*_block_sizes(node)[dim]), 1 if dim else columns)


def _local_col2im(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The rank's slice of the sum of the blocks in its window."""
    node = emit.node
    if not emit.windows:
        return emit.call(node.target, *args, **kwargs)
    (((_, factor), window),) = emit.windows.items()
    image = [int(n) for n in argument(node, "output_size")]
    dim, reach = _folded(node, image)
    extent, stride, padding = _block_sizes(node)[dim]
    image[dim] = (window.width // reach.length - 1) * stride + extent
    paddings = [0 if d == dim else n for d, n in enumerate(per_dim(argument(node, "padding"), 2))]
    args, kwargs = replaced(node, args, kwargs, output_size=image, padding=paddings)
    folded = emit.call(node.target, *args, **kwargs)
    return own_part(emit, folded, len(shape(node)) - 2 + dim, factor, Spread(extent, stride, padding))


def blocks_of(node: fx.Node) -> Rule:
    """Tensor.unfold: blocks of one dim, in a new last dim. (A 0-dim tensor has no dim to split.)"""
    count, reach = len(shape(operands(node)[0])), Strided(argument(node, "size"), argument(node, "step"))
    return over_dims(node, {argument(node, "dimension") % count: reach} if count else {})


ROWS: dict[Any, Row | RowFunction] = {
    aten.avg_pool1d.default: avg_pool,
    aten.avg_pool2d.default: avg_pool,
    aten.avg_pool3d.default: avg_pool,
    aten.col2im.default: col2im,
    aten.im2col.default: im2col,
    aten.max_pool1d.default: max_pool,
    aten.max_pool1d_with_indices.default: max_pool,
    aten.max_pool2d.default: max_pool,
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: last_dims_whole(2),
    aten.max_pool3d.default: max_pool,
    aten.max_pool3d_with_indices.default: max_pool,
    aten.max_unpool2d.default: last_dims_whole(2),
    aten.max_unpool3d.default: last_dims_whole(3),
    aten.unfold.default: blocks_of,
}
