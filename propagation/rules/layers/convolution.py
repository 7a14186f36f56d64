"""Convolutions: batch, output channels, input channels (summed), groups, and space.

Spatial dims split too: a rank's slice of the result depends on a window of the operand (`windows.py`), and the local
form is the operator itself, without padding along the split dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ....strategy.cut import REPEATS
from ...graph.nodes import argument, operands, per_dim, shape
from ...ops.padded_convolution import padded_convolution
from ..local_forms import own_part, replaced, spatial_dims, split_dims
from ..row import Row, RowFunction
from ..rule import Dims, Emitter, Localize, Rule
from ..windows import Halo, Reach, Spread, Strided

aten = torch.ops.aten

_PAD = aten.constant_pad_nd.default
# Convolutions with padding as a word, and their overloads with numbers.
_WITH_NUMBERS: dict[Any, Any] = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}
_BY_RANK = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}


# -- Convolutions ------------------------------------------------------------------------------------------------------


def padding_of(node: fx.Node, count: int) -> list[tuple[int, int]]:
    """The padding of a convolution before and after each spatial dim."""
    if node.target is padded_convolution:
        pad = [*argument(node, "pad"), *[0] * (2 * count)]
        return [(pad[2 * i], pad[2 * i + 1]) for i in reversed(range(count))]
    padding = argument(node, "padding")
    if padding == "same":
        extents = zip(per_dim(argument(node, "dilation"), count), shape(operands(node)[1])[-count:], strict=True)
        totals = [dilation * (kernel - 1) for dilation, kernel in extents]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in per_dim(0 if padding == "valid" else padding, count)]


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
    of a group, ...], or [input channels, output channels of a group, ...] if `transposed`."""
    x, weight = operands(node)[:2]
    count = len(reaches)
    groups = argument(node, "groups") or 1
    batched = len(shape(x)) == len(shape(weight))
    lead: Dims = (("b",),) if batched else ()
    sides = zip(shape(x)[-count:], shape(node)[-count:], strict=True)
    space: Dims = tuple((f"s{d}",) if 1 not in (before, after) else () for d, (before, after) in enumerate(sides))
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
    halos = tuple(Halo(0, part, reaches[d], fill) for d in range(count) for part in space[d])
    bias = frozenset({2} if operand_count == 3 else ())
    # not linear in the image if the padding beyond its ends is a nonzero number
    linear = tuple(bias | {i} for i in (0, 1) if i or fill == 0.0 or fill in REPEATS)
    spread = shape(x) if transposed else shape(node)
    return Rule(
        tuple(dims[:operand_count]), (out,), sizes, reduce=frozenset("i") & frozenset(sizes), additive=frozenset({2}),
        linear=linear, flops=2.0 * math.prod(spread) * math.prod(shape(weight)[1:]), local=local, windows=halos,
    )  # fmt: skip


def _groups(emit: Emitter, count: int) -> int:
    """The number of groups whose channels a rank has."""
    place = -count - 1
    held, whole = emit.shapes.operands[0][place], emit.whole[0][place]
    groups: int = argument(emit.node, "groups")
    return groups if groups == 1 else groups * held // whole


def _local_convolution(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Drop the padding along dims with a window, which is already padded; convolve only the rank's groups."""
    node = emit.node
    count = len(emit.whole[1]) - 2
    values: dict[str, Any] = {"groups": _groups(emit, count)} if argument(node, "groups") != 1 else {}
    split = spatial_dims(emit, count)
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
    """A padded convolution as a pad and a convolution; without the pad where the windows have all padding."""
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
    """The rank's slice of the range over which its window is spread."""
    node, count = emit.node, len(emit.whole[1]) - 2
    split = spatial_dims(emit, count)
    values: dict[str, Any] = {}
    for name in ("padding", "output_padding") if split else ():
        numbers = per_dim(argument(node, name), count)
        values[name] = [0 if d in split else n for d, n in enumerate(numbers)]
    if argument(node, "groups") != 1:
        values["groups"] = _groups(emit, count)
    args, kwargs = replaced(node, args, kwargs, **values)
    whole = emit.call(node.target, *args, **kwargs)
    spreads = _spreads(node)
    for dim, factor in split_dims(emit).items():
        whole = own_part(emit, whole, dim, factor, spreads[dim - (len(emit.whole[0]) - count)])
    return whole


ROWS: dict[Any, Row | RowFunction] = {
    aten.conv1d.default: convolution,
    aten.conv1d.padding: convolution,
    aten.conv2d.default: convolution,
    aten.conv2d.padding: convolution,
    aten.conv3d.default: convolution,
    aten.conv3d.padding: convolution,
    aten.conv_transpose1d.default: transposed_convolution,
    aten.conv_transpose2d.input: transposed_convolution,
    aten.conv_transpose3d.input: transposed_convolution,
    padded_convolution: convolution,
}
