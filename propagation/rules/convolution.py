"""Rules of operators that look at a neighbourhood of each element of an image (or of a series, or of a volume):
convolutions, pools, and what lays out blocks.

Their spatial dims are split like others: the part of the result that a rank makes is made of a window of the operand
(`windows.py`), and the local form is the operator itself, without padding along the dims that are split. What follows
the image's size by itself (interpolation, padding) is in `resampling.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...strategy.cut import REPEATS
from ..graph.nodes import argument, argument_names, operands, per_dim, results_of, shape, value
from ..ops.by_rank import of_rank, part_slice
from ..ops.dtypes import wide
from .padded_convolution import padded_convolution
from .rule import Dims, Emitter, Localize, Rule
from .windows import Halo, Reach, Rows, Spread, Strided

aten = torch.ops.aten
_PAD = aten.constant_pad_nd.default
# Convolutions whose padding is a word, and those that take numbers.
_WITH_NUMBERS: dict[Any, Any] = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}
_BY_RANK = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}


def replaced(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], **values: Any) -> tuple[Any, Any]:
    """The arguments of a call with some of them, by name, replaced."""
    names = argument_names(node)
    given = {**dict(zip(names, args, strict=False)), **kwargs, **values}
    count = max([len(args), *(names.index(name) + 1 for name in values)])
    for i in range(count):
        given.setdefault(names[i], argument(node, names[i]))
    return tuple(given[name] for name in names[:count]), {k: given[k] for k in kwargs if k not in names[:count]}


# -- What rules of one operand share -----------------------------------------------------------------------------------


def over_dims(
    node: fx.Node, reaches: Mapping[int, Reach], fill: float | str = 0.0, linear: bool = True,
    local: Localize | None = None, whole: Collection[int] = (),
) -> Rule:  # fmt: skip
    """The rule of an operator whose results have the dims of its operand: of those in `reaches` slices are made of a
    window, others are independent. Those in `whole` stay whole, and what is of size 1 before or after."""
    size, results = shape(operands(node)[0]), results_of(node)
    made = tuple(results[0].shape)
    sides = enumerate(zip(size, made, strict=False))
    dims: Dims = tuple((f"f{d}",) if 1 not in both and d not in whole else () for d, both in sides)
    sizes = {parts[0]: extent for parts, extent in zip(dims, made, strict=False) if parts}
    halos = tuple(Halo(0, dims[d][0], reach, fill) for d, reach in reaches.items() if dims[d])
    out = (*dims, *((),) * (len(made) - len(size)))
    sets = (frozenset({0}),) if linear else ()
    return Rule((dims,), (out,) * len(results), sizes, linear=sets, windows=halos, local=local)


def split_dims(emit: Emitter) -> dict[int, str]:
    """The dims of the first operand of which a rank has a window, each with its factor."""
    return {window.dim: factor for (_, factor), window in emit.windows.items()}


def constants(
    emit: Emitter, like: fx.Node, factor: str, rows: Sequence[Sequence[float]], dtype: torch.dtype
) -> fx.Node:
    """The numbers in `rows`, those of each part of `factor`, of which a rank has its own."""
    flat = [float(number) for row in rows for number in row]
    like = emit.call(aten.detach.default, like)  # whose gradient these have no part in
    return emit.call(of_rank, like, emit.position(factor), flat, len(rows[0]), dtype)


def cropped(emit: Emitter, x: fx.Node, dim: int, factor: str, starts: Sequence[int], length: int) -> fx.Node:
    """`length` elements of `x`, of which each part of `factor` begins at its own place in `starts`."""
    if len(set(starts)) == 1:
        return emit.call(aten.slice.Tensor, x, dim, starts[0], starts[0] + length)
    return emit.call(part_slice, x, emit.position(factor), dim, list(starts), length)


# -- Convolution -------------------------------------------------------------------------------------------------------


def padding_of(node: fx.Node, count: int) -> list[tuple[int, int]]:
    """The padding of a convolution before and after each spatial dim."""
    if node.target is padded_convolution:
        pad = [*argument(node, "pad"), *[0] * (2 * count)]
        return [(pad[2 * i], pad[2 * i + 1]) for i in reversed(range(count))]
    given = argument(node, "padding")
    if given == "same":
        extents = zip(per_dim(argument(node, "dilation"), count), shape(operands(node)[1])[-count:], strict=True)
        totals = [dilation * (kernel - 1) for dilation, kernel in extents]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in per_dim(0 if given == "valid" else given, count)]


def convolution(node: fx.Node) -> Rule | None:
    """conv1d, conv2d, conv3d: batch, output channels, input channels (summed), groups, and space."""
    kernel = shape(operands(node)[1])[2:]
    count = len(kernel)
    padding = padding_of(node, count)
    strides, dilations = (per_dim(argument(node, name), count) for name in ("stride", "dilation"))
    reaches = [Strided(dilations[d] * (kernel[d] - 1) + 1, strides[d], padding[d][0]) for d in range(count)]
    fill: float | str = 0.0
    if node.target is padded_convolution:
        fill = argument(node, "value") if argument(node, "mode") == "constant" else argument(node, "mode")
    return _convolution(node, reaches, fill, _local_convolution)


def _convolution(
    node: fx.Node, reaches: Sequence[Reach], fill: float | str, local: Localize, transposed: bool = False
) -> Rule:
    """The rule of a convolution with the `reaches` of its spatial dims. The weight is [output channels, input channels
    of a group, ...], of a transposed one [input channels, output channels of a group, ...]."""
    x, weight = operands(node)[:2]
    count = len(reaches)
    groups = argument(node, "groups") or 1
    batched = len(shape(x)) == len(shape(weight))
    lead: Dims = (("b",),) if batched else ()
    sides = zip(shape(x)[-count:], shape(node)[-count:], strict=True)
    space: Dims = tuple((f"s{d}",) if 1 not in (held, made) else () for d, (held, made) in enumerate(sides))
    sizes = {"b": shape(x)[0]} if batched else {}
    sizes |= {f[0]: n for f, n in zip(space, shape(node)[-count:], strict=True) if f}
    inputs, outputs = shape(x)[-count - 1], shape(node)[-count - 1]
    window = ((),) * count
    if groups == 1:
        sizes |= {"o": outputs, "i": inputs}
        channels: Dims = (("i",), ("o",)) if transposed else (("o",), ("i",))
        dims: list[Dims] = [(*lead, ("i",), *space), (*channels, *window), (("o",),)]
        out: Dims = (*lead, ("o",), *space)
    else:
        sizes |= {"g": groups, "o": outputs // groups}
        channels = (("g",), ()) if transposed else (("g", "o"), ())
        dims = [(*lead, ("g",), *space), (*channels, *window), (("g", "o"),)]
        out = (*lead, ("g", "o"), *space)
    operand_count = len(operands(node))
    halos = tuple(Halo(0, space[d][0], reaches[d], fill) for d in range(count) if space[d])
    bias = frozenset({2} if operand_count == 3 else ())
    # not in the image where what is beyond its ends is an addend of its own
    linear = tuple(bias | {i} for i in (0, 1) if i or fill == 0.0 or fill in REPEATS)
    spread = shape(x) if transposed else shape(node)
    return Rule(
        tuple(dims[:operand_count]), (out,), sizes, reduce=frozenset("i") & frozenset(sizes), additive=frozenset({2}),
        linear=linear, flops=2.0 * math.prod(spread) * math.prod(shape(weight)[1:]), local=local, windows=halos,
    )  # fmt: skip


def _spatial_dims(emit: Emitter, count: int) -> set[int]:
    """Which of the last `count` dims, counted from the first of them, a rank has windows of."""
    return {dim - (len(emit.whole[0]) - count) for dim in split_dims(emit)}


def _groups(emit: Emitter, count: int) -> int:
    """The groups of a convolution of which a rank has the channels."""
    place = -count - 1
    held, whole = emit.shapes.operands[0][place], emit.whole[0][place]
    groups: int = argument(emit.node, "groups")
    return groups if groups == 1 else groups * held // whole


def _local_convolution(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A window is padded already. A rank that holds a part of the groups convolves that many."""
    node = emit.node
    count = len(emit.whole[1]) - 2
    values: dict[str, Any] = {"groups": _groups(emit, count)} if argument(node, "groups") != 1 else {}
    split = _spatial_dims(emit, count)
    padding = [(0, 0) if d in split else both for d, both in enumerate(padding_of(node, count))]
    flat = [n for both in reversed(padding) for n in both]
    if node.target is padded_convolution:
        return _after_padding(emit, args, flat, values, count)
    if split:
        if any(before != after for before, after in padding):
            args = (emit.call(_PAD, args[0], flat), *args[1:])
            padding = [(0, 0)] * count
        values["padding"] = [before for before, _ in padding]
    args, kwargs = replaced(node, args, kwargs, **values)
    target = _WITH_NUMBERS.get(node.target, node.target) if "padding" in values else node.target
    return emit.call(target, *args, **kwargs)


def _after_padding(emit: Emitter, args: tuple[Any, ...], pad: list[int], values: dict[str, Any], count: int) -> fx.Node:
    """A padded convolution as its two operators, of which the first is none where windows bring all padding."""
    x, weight, bias, _, mode, number, stride, dilation, groups = args
    if any(pad):
        x = emit.call(aten.pad.default, x, pad, mode, number if mode == "constant" else None)
    groups = values.get("groups", groups)
    return emit.call(_BY_RANK[count], x, weight, bias, stride, [0] * count, dilation, groups)


def transposed_convolution(node: fx.Node) -> Rule | None:
    """conv_transpose1d, 2d, 3d: like a convolution; each element is spread over a range of the result."""
    return _convolution(node, _spreads(node), 0.0, _local_transposed, transposed=True)


def _spreads(node: fx.Node) -> list[Spread]:
    kernel = shape(operands(node)[1])[2:]
    strides, paddings, dilations = (
        per_dim(argument(node, name), len(kernel)) for name in ("stride", "padding", "dilation")
    )
    every = zip(kernel, strides, paddings, dilations, strict=True)
    return [Spread(dilation * (extent - 1) + 1, stride, padding) for extent, stride, padding, dilation in every]


def _local_transposed(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """What the window is spread over, of which a rank takes its slice."""
    node, count = emit.node, len(emit.whole[1]) - 2
    split = _spatial_dims(emit, count)
    values: dict[str, Any] = {}
    for name in ("padding", "output_padding") if split else ():
        given = per_dim(argument(node, name), count)
        values[name] = [0 if d in split else n for d, n in enumerate(given)]
    if argument(node, "groups") != 1:
        values["groups"] = _groups(emit, count)
    args, kwargs = replaced(node, args, kwargs, **values)
    made = emit.call(node.target, *args, **kwargs)
    spreads = _spreads(node)
    for dim, factor in split_dims(emit).items():
        made = _own_part(emit, made, dim, factor, spreads[dim - (len(emit.whole[0]) - count)])
    return made


def _own_part(emit: Emitter, made: fx.Node, dim: int, factor: str, spread: Spread) -> fx.Node:
    """The slice of `factor` that a rank has of what its window is spread over."""
    cut = emit.cut(factor)
    places = [spread.place(start) if start < stop else None for start, stop in cut.spans]
    known = next(place for place in places if place is not None)
    return cropped(emit, made, dim, factor, [known if place is None else place for place in places], cut.width)


# -- Pools -------------------------------------------------------------------------------------------------------------


def max_pool(node: fx.Node) -> Rule:
    """Pools that take the largest element; those beyond the ends are less than any."""
    tensor, beyond = results_of(node)[0], any(_pool_sizes(node)[2]) or argument(node, "ceil_mode")
    least = -math.inf if tensor.dtype.is_floating_point else float(torch.iinfo(tensor.dtype).min)
    return over_dims(node, _pool_reaches(node), least if beyond else 0.0, linear=False, local=_local_max_pool)


def _count(node: fx.Node) -> int:
    """How many dims an operator works along, which its name says."""
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
    """The operator itself on windows, which are padded already; its argument called padding is of the last dims."""
    count = _count(emit.node)
    split = _spatial_dims(emit, count)
    if split:
        padding = [0 if d in split else n for d, n in enumerate(per_dim(argument(emit.node, "padding"), count))]
        args, kwargs = replaced(emit.node, args, kwargs, padding=padding)
    return emit.call(emit.node.target, *args, **kwargs)


def _local_max_pool(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | tuple[fx.Node, ...]:
    """Where a pool tells indices, they are those of the whole image."""
    made = _without_padding(emit, args, kwargs)
    if not emit.windows or len(results_of(emit.node)) == 1:
        return made
    largest, index = (emit.call(operator.getitem, made, i) for i in range(2))
    return largest, _global_index(emit, index)


def _global_index(emit: Emitter, index: fx.Node) -> fx.Node:
    """Places in an image whose rows are one after another, counted in the window, counted in the whole."""
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
    """Pools that take the mean, each of as many elements as PyTorch says."""
    return over_dims(node, _pool_reaches(node), local=_local_avg_pool)


def _local_avg_pool(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """On a window each mean is one of a full kernel; near the ends PyTorch may divide by less."""
    made = _without_padding(emit, args, kwargs)
    node = emit.node
    if "divisor_override" in argument_names(node) and argument(node, "divisor_override") is not None:
        return made
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
            factors = constants(emit, made, factor, rows, wide(dtype))
            around = [cut.width if d == dim else 1 for d in range(len(emit.whole[0]))]
            made = emit.call(aten.mul.Tensor, made, emit.call(aten.reshape.default, factors, around))
            if wide(dtype) != dtype:
                made = emit.call(aten._to_copy.default, made, dtype=dtype)
    return made


# -- Blocks ------------------------------------------------------------------------------------------------------------


def im2col(node: fx.Node) -> Rule:
    """unfold: blocks of an image become columns; the dim of blocks is merged of their rows and their columns. Rows are
    split; columns where there is one row of blocks."""
    size = shape(operands(node)[0])
    blocks = _blocks(node, size[-2:])
    dim = 1 if blocks[0] == 1 else 0
    factor: tuple[str, ...] = () if 1 in (size[-2:][dim], blocks[dim]) else (f"s{dim}",)
    merged = (*factor, "columns") if factor and dim == 0 and blocks[1] > 1 else factor
    lead: Dims = (("b",),) if len(size) == 4 else ()
    space: Dims = tuple(factor if d == dim else () for d in range(2))
    sizes = ({"b": size[0]} if lead else {}) | {"c": size[-3]} | dict.fromkeys(factor, blocks[dim])
    return Rule(
        ((*lead, ("c",), *space),), ((*lead, ("c",), merged),), sizes, linear=(frozenset({0}),), even=frozenset("c"),
        windows=tuple(Halo(0, f, Strided(*_block_sizes(node)[dim])) for f in factor), local=_local_im2col,
    )  # fmt: skip


def _block_sizes(node: fx.Node) -> list[tuple[int, int, int]]:
    """Of im2col and col2im, for each dim the extent of a block, the stride and the padding."""
    kernel, strides, paddings, dilations = (
        per_dim(argument(node, name), 2) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    return [(dilations[d] * (kernel[d] - 1) + 1, strides[d], paddings[d]) for d in range(2)]


def _blocks(node: fx.Node, image: Sequence[int]) -> list[int]:
    """How many blocks of `image` im2col makes along each dim."""
    every = zip(image, _block_sizes(node), strict=True)
    return [(size + 2 * padding - extent) // stride + 1 for size, (extent, stride, padding) in every]


def _local_im2col(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return _without_padding(emit, args, kwargs)


def col2im(node: fx.Node) -> Rule:
    """fold: columns are added up where their blocks are in an image. The rows of the image are split, whose reach in
    the merged dim of blocks is whole rows of blocks; its columns where there is one row of blocks."""
    (columns,), image = operands(node), [int(n) for n in argument(node, "output_size")]
    size, (dim, reach) = shape(columns), _folded(node, image)
    factor: tuple[str, ...] = () if 1 in (size[-1], image[dim]) else (f"s{dim}",)
    lead: Dims = (("b",),) if len(size) == 3 else ()
    space: Dims = tuple(factor if d == dim else () for d in range(2))
    sizes = ({"b": size[0]} if lead else {}) | {"c": shape(node)[-3]} | dict.fromkeys(factor, image[dim])
    return Rule(
        ((*lead, ("c",), factor),), ((*lead, ("c",), *space),), sizes, linear=(frozenset({0}),), even=frozenset("c"),
        windows=tuple(Halo(0, f, reach) for f in factor), local=_local_col2im,
    )  # fmt: skip


def _folded(node: fx.Node, image: Sequence[int]) -> tuple[int, Rows]:
    """Which dim of the image that col2im makes can be split, and the reach of its slices among the blocks."""
    rows, columns = _blocks(node, image)
    dim = 1 if rows == 1 else 0
    return dim, Rows(Spread(*_block_sizes(node)[dim]), 1 if dim else columns)


def _local_col2im(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """What the blocks in the window are added up to, of which a rank takes its slice."""
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
    made = emit.call(node.target, *args, **kwargs)
    return _own_part(emit, made, len(shape(node)) - 2 + dim, factor, Spread(extent, stride, padding))


def blocks_of(node: fx.Node) -> Rule:
    """Tensor.unfold: blocks of one dim, in a new one behind all. (A number has no dim to split.)"""
    count, reach = len(shape(operands(node)[0])), Strided(argument(node, "size"), argument(node, "step"))
    return over_dims(node, {argument(node, "dimension") % count: reach} if count else {})
