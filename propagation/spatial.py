"""Rules of operators that look at a neighbourhood of each element of an image (or of a series, or of a volume).

Their spatial dims are split like others: the part of the result that a rank makes is made of a window of the operand
(`windows.py`), and the local form is the operator itself, without padding along the dims that are split.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from .graph import argument, argument_names, operands, shape
from .rule import Dims, Emitter, Rule
from .windows import Halo, Strided

aten = torch.ops.aten
_PAD = aten.constant_pad_nd.default
# Convolutions whose padding is a word, and those that take numbers.
_WITH_NUMBERS = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def replaced(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], **values: Any) -> tuple[Any, Any]:
    """The arguments of a call with some of them, by name, replaced."""
    names = argument_names(node)
    given = {**dict(zip(names, args, strict=False)), **kwargs, **values}
    count = max([len(args), *(names.index(name) + 1 for name in values)])
    for i in range(count):
        given.setdefault(names[i], argument(node, names[i]))
    return tuple(given[name] for name in names[:count]), {k: given[k] for k in kwargs if k not in names[:count]}


def per_dim(value: Any, count: int) -> list[int]:
    """An argument that may stand for all dims, once for each."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [int(v) for v in values] * (count if len(values) == 1 else 1)


def space(size: tuple[int, ...], count: int) -> Dims:
    """One factor s0, s1, ... for each of the last `count` dims, none for a dim of size 1."""
    return tuple((f"s{d}",) if extent != 1 else () for d, extent in enumerate(size[len(size) - count :]))


# -- Convolution


def padding_of(node: fx.Node, count: int) -> list[tuple[int, int]]:
    """The padding of a convolution before and after each spatial dim."""
    given = argument(node, "padding")
    if given == "same":
        extents = zip(per_dim(argument(node, "dilation"), count), shape(operands(node)[1])[-count:], strict=True)
        totals = [dilation * (kernel - 1) for dilation, kernel in extents]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in per_dim(0 if given == "valid" else given, count)]


def convolution(node: fx.Node) -> Rule | None:
    """conv1d, conv2d, conv3d: batch, output channels, input channels (summed), groups, and space."""
    x, weight = operands(node)[:2]
    count = len(shape(weight)) - 2
    groups = argument(node, "groups") or 1
    batched = len(shape(x)) == len(shape(weight))
    lead: Dims = (("b",),) if batched else ()
    outputs, inputs, *kernel = shape(weight)
    made, window = space(shape(node), count), ((),) * count
    held = tuple(f if n != 1 else () for f, n in zip(made, shape(x)[-count:], strict=True))
    made = tuple(f if h else () for f, h in zip(made, held, strict=True))
    sizes = {"b": shape(x)[0]} if batched else {}
    sizes |= {f[0]: n for f, n in zip(made, shape(node)[-count:], strict=True) if f}
    if groups == 1:
        sizes |= {"o": outputs, "i": inputs}
        dims: list[Dims] = [(*lead, ("i",), *held), (("o",), ("i",), *window), (("o",),)]
        out: Dims = (*lead, ("o",), *made)
    else:
        sizes |= {"g": groups, "o": outputs // groups}
        dims = [(*lead, ("g",), *held), (("g", "o"), (), *window), (("g", "o"),)]
        out = (*lead, ("g", "o"), *made)
    operand_count = len(operands(node))
    padding = padding_of(node, count)
    strides, dilations = (per_dim(argument(node, name), count) for name in ("stride", "dilation"))
    halos = tuple(
        Halo(0, made[d][0], Strided(dilations[d] * (kernel[d] - 1) + 1, strides[d], padding[d][0]))
        for d in range(count)
        if made[d]
    )
    linear = (frozenset({0, 2}), frozenset({1, 2})) if operand_count == 3 else (frozenset({0}), frozenset({1}))
    return Rule(
        tuple(dims[:operand_count]), (out,), sizes, reduce=frozenset("i") & frozenset(sizes), additive=frozenset({2}),
        linear=linear, flops=2.0 * math.prod(shape(node)) * math.prod(shape(weight)[1:]), local=_local_convolution,
        windows=halos,
    )  # fmt: skip


def _local_convolution(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A window is padded already. A rank that holds a part of the groups convolves that many: its input channels over
    those of one group."""
    node, (x, weight) = emit.node, emit.shapes.operands[:2]
    count = len(weight) - 2
    values: dict[str, Any] = {}
    if argument(node, "groups") != 1:
        values["groups"] = x[len(x) - count - 1] // weight[1]
    if emit.windows:
        split = {window.dim - (len(x) - count) for window in emit.windows.values()}
        padding = [(0, 0) if d in split else both for d, both in enumerate(padding_of(node, count))]
        if any(before != after for before, after in padding):
            flat = [n for both in reversed(padding) for n in both]
            args = (emit.call(_PAD, args[0], flat), *args[1:])
            padding = [(0, 0)] * count
        values["padding"] = [before for before, _ in padding]
    args, kwargs = replaced(node, args, kwargs, **values)
    target = _WITH_NUMBERS.get(node.target, node.target) if "padding" in values else node.target
    return emit.call(target, *args, **kwargs)
