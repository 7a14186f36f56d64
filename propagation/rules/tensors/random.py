"""PyTorch's random operators in terms of those of `random_numbers.py`.

Each operator of the graph has its own key; distributions without a kind are functions of uniform numbers. Operators
without an expansion here (multinomial, randperm, poisson) draw whole tensors from torch's generator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ....strategy.errors import CaptureError
from ...graph.nodes import argument, argument_names, at_source, operands, shape, value
from ...ops.dtypes import wide
from ...ops.random_numbers import DIGITS, bernoulli, draw
from ..builder import Builder, Expansion
from ..dims import letters_of, sizes_of
from ..row import Row, RowFunction
from ..rule import Emitter, Rule

aten = torch.ops.aten

# Operators whose distribution depends on the values of their operands.
_OF_VALUES = frozenset({
    aten.bernoulli.Tensor, aten.bernoulli.default, aten.normal.Tensor_Tensor, aten.normal.Tensor_float,
    aten.normal.float_Tensor, aten.rrelu.default,
})  # fmt: skip
_LAID = "partway_laid"  # marks a call whose operands lie in memory as on one device

# -- The rule


def _draw_rule(node: fx.Node) -> Rule | None:
    """Random numbers are independent."""
    letters = letters_of(shape(node))
    return Rule(((),), (letters,), sizes_of(letters, shape(node)), local=_local_draw)


def _local_draw(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Draw the rank's part, from its places and cuts."""
    key, _, _, _, *rest = args
    split = {dim: parts[0] for dim, parts in enumerate(emit.rule.results[0]) if parts and parts[0] in emit.split}
    places = [emit.position(factor) for factor in split.values()]
    cuts = [str(emit.cut(factor)) for factor in split.values()]
    return emit.call(draw, key, places, list(split), cuts, *rest, **kwargs)


# -- Expansions


def drawn(
    b: Builder, kind: str, parameters: Sequence[float], size: tuple[int, ...], dtype: torch.dtype, like: fx.Node
) -> fx.Node:
    """A tensor of random numbers on the device of `like`. Complex numbers have real and imaginary parts of the same
    kind, which share the variance if it is normal."""
    assert b.keys is not None
    if dtype.is_complex:
        mean = 0.0
        if kind == "normal":
            mean, parameters = parameters[0], [0.0, parameters[1] / math.sqrt(2)]
        numbers = b(aten.view_as_complex.default, drawn(b, kind, parameters, (*size, 2), dtype.to_real(), like))
        return b(aten.add.Scalar, numbers, mean) if mean else numbers
    arguments = kind, [float(n) for n in parameters], list(size), dtype, value(like).device, b.keys.stream
    return b(draw, b.keys.take(b), [], [], [], *arguments)


def memory_order(x: torch.Tensor) -> list[int]:
    """The order of dims in which the elements of a new tensor like `x` lie in memory."""
    strides = torch.empty_like(x).stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], d))


def _dense(x: torch.Tensor) -> bool:
    """Whether `x` has the strides of a new tensor like it, without gaps or overlaps."""
    new = torch.empty_like(x).stride()
    return all(n == 1 or own == other for n, own, other in zip(x.shape, x.stride(), new, strict=True))


def fresh(b: Builder, like: torch.Tensor, dtype: torch.dtype) -> fx.Node:
    """An empty tensor with the memory layout of a new one like `like`."""
    order = memory_order(like)
    empty = b(aten.empty.memory_format, [like.shape[d] for d in order], dtype=dtype, device=like.device)
    return _from_order(b, empty, order)


def _from_order(b: Builder, x: fx.Node, order: list[int]) -> fx.Node:
    """`x`, whose dims are in memory order, permuted back to their own order."""
    return x if order == sorted(order) else b(aten.permute.default, x, [order.index(d) for d in range(len(order))])


def _drawn_by_torch(b: Builder, node: fx.Node) -> fx.Node | None:
    """The operator itself on operands with the same strides as on one device: numbers are drawn in memory order, and
    some kernels draw others for tensors that are not contiguous."""
    if not operands(node) or node.meta.get(_LAID):
        return None
    if node.target is aten.bernoulli.p:
        x = operands(node)[0]
        return b(bernoulli, fresh(b, value(x), value(x).dtype), argument(node, "p"))

    def laid(x: fx.Node) -> fx.Node:
        if node.target not in _OF_VALUES:
            return fresh(b, value(node), value(x).dtype)
        order = memory_order(value(x))
        ordered = b(aten.permute.default, x, order)
        return _from_order(b, b(aten.clone.default, ordered, memory_format=torch.contiguous_format), order)

    args, kwargs = map_arg((node.args, node.kwargs), laid)
    drawn_whole = b(node.target, *args, **kwargs)
    drawn_whole.meta[_LAID] = True
    return drawn_whole


def _of(kind: str, *parameters: str | float) -> Expansion:
    """An operator whose results are of one kind; a name in `parameters` stands for its argument."""

    def expansion(b: Builder, node: fx.Node) -> fx.Node:
        numbers = [argument(node, n) if isinstance(n, str) else n for n in parameters]
        return drawn(b, kind, numbers, shape(node), value(node).dtype, node)

    return expansion


def _normal(b: Builder, node: fx.Node) -> fx.Node:
    """normal of tensors: mean + deviation * a standard normal number."""
    mean, deviation = argument(node, "mean"), argument(node, "std")
    numbers = drawn(b, "normal", [0.0, 1.0], shape(node), value(node).dtype, node)
    numbers = b(aten.mul.Tensor, numbers, deviation)
    return b(aten.add.Tensor, numbers, mean)


def _bernoulli(b: Builder, node: fx.Node) -> fx.Node:
    """bernoulli with a tensor of probabilities: whether a uniform number is below the probability."""
    p = operands(node)[-1]
    uniform = drawn(b, "uniform", [0.0, 1.0], shape(node), wide(value(p).dtype), p)
    return b.cast(b(aten.lt.Tensor, uniform, p), value(node).dtype)


def _inverse(quantile: Callable[[Builder, fx.Node, fx.Node], fx.Node]) -> Expansion:
    """A distribution by its quantile function, applied to uniform numbers between 0 and 1."""

    def expansion(b: Builder, node: fx.Node) -> fx.Node:
        dtype = value(node).dtype
        exact = wide(dtype) if dtype.is_floating_point else torch.float32
        return b.cast(quantile(b, node, drawn(b, "open", [], shape(node), exact, node)), dtype)

    return expansion


def _exponential(b: Builder, node: fx.Node, u: fx.Node) -> fx.Node:
    return b(aten.mul.Scalar, b(aten.log.default, u), -1 / argument(node, "lambd"))


def _cauchy(b: Builder, node: fx.Node, u: fx.Node) -> fx.Node:
    angle = b(aten.mul.Scalar, b(aten.sub.Scalar, u, 0.5), math.pi)
    numbers = b(aten.mul.Scalar, b(aten.tan.default, angle), argument(node, "sigma"))
    return b(aten.add.Scalar, numbers, argument(node, "median"))


def _geometric(b: Builder, node: fx.Node, u: fx.Node) -> fx.Node:
    """The number of trials until a success of probability p, at least one."""
    p = argument(node, "p")
    tries = b(aten.mul.Scalar, b(aten.log.default, u), 1 / math.log1p(-p) if p < 1 else 0.0)
    return b(aten.clamp_min.default, b(aten.ceil.default, tries), 1)


def _log_normal(b: Builder, node: fx.Node) -> fx.Node:
    parameters, dtype = [argument(node, "mean"), argument(node, "std")], value(node).dtype
    return b.cast(b(aten.exp.default, drawn(b, "normal", parameters, shape(node), wide(dtype), node)), dtype)


def _rrelu(b: Builder, node: fx.Node) -> fx.Node | None:
    """rrelu: in training the slope of each negative element is uniform."""
    x, bounds = operands(node)[0], [argument(node, "lower"), argument(node, "upper")]
    if not argument(node, "training"):
        return None
    slopes = drawn(b, "uniform", bounds, shape(x), value(x).dtype, x)
    return b(aten.where.self, b(aten.ge.Scalar, x, 0), x, b(aten.mul.Tensor, x, slopes))


def _integers(b: Builder, node: fx.Node) -> fx.Node:
    """randint, and random, which without bounds draws nonnegative integers over the range of its dtype."""
    names, dtype = argument_names(node), value(node).dtype
    low = argument(node, "low" if "low" in names else "from") if {"low", "from"} & set(names) else 0
    high = next((argument(node, name) for name in ("high", "to") if name in names), None)
    if high is None:
        high = 2 ** DIGITS[dtype] if dtype in DIGITS else 2 if dtype == torch.bool else torch.iinfo(dtype).max
    return b.cast(drawn(b, "integers", [low, high], shape(node), torch.int64, node), dtype)


def _expand_native_dropout(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...] | None:
    """native_dropout: the mask does not depend on x, so that every layout of x has its part of the same mask."""
    x, p, train = operands(node)[0], argument(node, "p"), argument(node, "train")
    if node.meta.get(_LAID):
        return None
    if not train or p == 0:
        return (x, b(aten.ones.default, list(shape(x)), dtype=torch.bool, device=value(x).device))
    return dropped(b, x, p)


def dropped(b: Builder, x: fx.Node, p: float) -> tuple[fx.Node, fx.Node]:
    """x * mask / (1 - p), and the mask."""
    if b.keys is None and value(x).device.type == "cuda" and 0 < p < 1:
        # PyTorch's kernel there draws in its own order, and in another one for tensors that are not dense
        if not _dense(value(x)):
            raise CaptureError(
                f"dropout of a tensor that is not dense (its shape is {list(shape(x))}, its strides "
                f"{value(x).stride()}) draws other numbers on CUDA than its parts could: set random_numbers to "
                f"'counter', or make the tensor contiguous{at_source(x)}"
            )
        both = b(aten.native_dropout.default, fresh(b, value(x), value(x).dtype), p, True)
        both.meta[_LAID] = True
        mask = b(operator.getitem, both, 1)
        return b(aten.mul.Scalar, b(aten.mul.Tensor, x, mask), 1 / (1 - p)), mask
    if b.keys is None:  # the numbers that PyTorch itself would draw
        kept = b(bernoulli, fresh(b, value(x), value(x).dtype), 1 - p)
        return b(aten.mul.Tensor, x, b(aten.div.Scalar, kept, 1 - p if p < 1 else 1)), b(aten.ne.Scalar, kept, 0)
    mask = drawn(b, "bernoulli", [1 - p], shape(x), torch.bool, x)
    return b(aten.mul.Scalar, b(aten.mul.Tensor, x, mask), 1 / (1 - p) if p < 1 else 0.0), mask


def _by_keys_or_torch(expansion: Expansion) -> Expansion:
    """`expansion` where there are keys; with `random_numbers="torch"` the numbers that PyTorch itself would draw."""
    return lambda b, node: _drawn_by_torch(b, node) if b.keys is None else expansion(b, node)


# In terms of the operators of `random_numbers.py`; without keys, PyTorch draws (`_drawn_by_torch`).
_DRAWN: dict[Any, Expansion] = {
    aten.bernoulli.Tensor: _bernoulli,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _of("bernoulli", "p"),
    aten.cauchy.default: _inverse(_cauchy),
    aten.exponential.default: _inverse(_exponential),
    aten.geometric.default: _inverse(_geometric),
    aten.log_normal.default: _log_normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.float_float: _of("normal", "mean", "std"),
    aten.normal_functional.default: _of("normal", "mean", "std"),
    aten.rand.default: _of("uniform", 0.0, 1.0),
    aten.rand_like.default: _of("uniform", 0.0, 1.0),
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.randn.default: _of("normal", 0.0, 1.0),
    aten.randn_like.default: _of("normal", 0.0, 1.0),
    aten.random.default: _integers,
    aten.random.to: _integers,
    aten.rrelu.default: _rrelu,
    aten.uniform.default: _of("uniform", "from", "to"),
}

ROWS: dict[Any, Row | RowFunction] = {
    draw: _draw_rule,
}

EXPANSIONS: dict[Any, Expansion] = {
    **{operator: _by_keys_or_torch(expansion) for operator, expansion in _DRAWN.items()},
    aten.native_dropout.default: _expand_native_dropout,
}
