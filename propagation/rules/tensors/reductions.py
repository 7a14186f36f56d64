"""Reductions: sums and maxima, and the means, variances, norms and logsumexp that expansion writes in terms of them. A
mean is a sum divided by the *global* count, so the count of a rank's elements never enters.

They compute in float32 for tensors of lower precision, as PyTorch's kernels do inside. At zero, where a square root has
no derivative, a standard deviation and a norm have a gradient of zeros, as in PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, operands, shape, value
from ...ops.constants import stationary
from ...ops.dtypes import wide
from ..builder import Builder, Expansion
from ..dims import along, letters_of, sizes_of, without
from ..row import Row, RowFunction, parse_row
from ..rule import Rule

aten = torch.ops.aten


def _dims(node: fx.Node) -> tuple[int, ...]:
    """The dims that a call reduces; all if it names none."""
    count = len(shape(operands(node)[0]))
    dims = argument(node, "dim") if "dim" in argument_names(node) else None
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(d % max(count, 1) for d in dims) if dims else tuple(range(count))


def _keeps(node: fx.Node) -> bool:
    return bool("keepdim" in argument_names(node) and argument(node, "keepdim"))


# -- Rules

# Operators whose result is the maximum of the reduced elements.
MAXIMA = frozenset({aten.amax.default})


def _reduction_rule(node: fx.Node) -> Rule | None:
    """Sums and maxima over dims: a split of a summed dim leaves addends, or candidates for the maximum."""
    x = operands(node)[0]
    size, dims = shape(x), argument(node, "dim") if "dim" in argument_names(node) else None
    letters = letters_of(size)
    summed = {d % len(size) for d in dims} if dims and size else set(range(len(size)))
    keep = bool(len(shape(node))) and len(shape(node)) == len(size)
    out = without(letters, summed) if keep else tuple(p for d, p in enumerate(letters) if d not in summed)
    largest = node.target in MAXIMA
    return Rule(
        (letters,),
        (out,),
        sizes_of(letters, size),
        reduce=frozenset(f for d in summed for f in letters[d]),
        reduce_by="max" if largest else "sum",
        linear=() if largest else (frozenset({0}),),
    )


def _histogram_rule(node: fx.Node) -> Rule:
    """histc: the number of elements in each bin. With explicit bounds every part has addends; otherwise the bounds
    depend on all elements, which stay whole."""
    (x,) = operands(node)
    every = () if argument(node, "min") < argument(node, "max") else range(len(shape(x)))
    letters = without(letters_of(shape(x)), every)
    sizes = sizes_of(letters, shape(x))
    return Rule((letters,), (((),),), sizes, reduce=frozenset(sizes), even=frozenset(sizes))


def _matrix_norm_rule(node: fx.Node) -> Rule:
    """Norms over two dims, or of any order over some: the reduced dims stay whole."""
    size, dims = shape(operands(node)[0]), argument(node, "dim")
    reduced = (
        {d % len(size) for d in ([dims] if isinstance(dims, int) else dims)}
        if dims is not None
        else set(range(len(size)))
    )
    factors = ["1" if d in reduced else f"f{d}" for d in range(len(size))]
    result = factors if argument(node, "keepdim") else [f for f in factors if f != "1"]
    return parse_row(Row(f"{' '.join(factors)} -> {' '.join(result)}", even=True), node)


# -- Expansions


def _expand_mean(b: Builder, node: fx.Node) -> fx.Node:
    x = operands(node)[0]
    dims = argument(node, "dim") if "dim" in argument_names(node) else None
    every = tuple(range(len(shape(x))))
    dims = [d % len(every) for d in dims] if dims and every else list(every)
    keep = argument(node, "keepdim") if "keepdim" in argument_names(node) else False
    total = b(aten.sum.dim_IntList, x, dims, keep, dtype=argument(node, "dtype"))
    return b(aten.div.Scalar, total, math.prod(shape(x)[d] for d in dims))


def _expand_histogram(b: Builder, node: fx.Node) -> fx.Node | None:
    """histc of integers, which only a GPU has: a model of the meta device, planned as on the CPU, may call it."""
    (x,) = operands(node)
    if value(x).is_floating_point() or value(x).device.type != "cpu":
        return None
    counts = b(aten.histc.default, b.cast(x, torch.float64), *node.args[1:], **node.kwargs)
    return b.cast(counts, value(node).dtype)


def _correction(node: fx.Node) -> float:
    """The difference between the count and the divisor of a variance."""
    if "unbiased" in argument_names(node):
        return float(argument(node, "unbiased"))
    correction = argument(node, "correction")
    return 1.0 if correction is None else float(correction)


def _root(b: Builder, x: fx.Node) -> fx.Node:
    """The square root, with a gradient of zero at zero."""
    zero = b(aten.eq.Scalar, x, 0)
    return b(aten.masked_fill.Scalar, b(aten.sqrt.default, b(aten.masked_fill.Scalar, x, zero, 1.0)), zero, 0.0)


def _variance_and_mean(b: Builder, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Variance and mean. The squared deviations treat the mean as a constant: the derivative of a variance by its
    center is zero at the mean, so that its gradient needs no sum over the ranks."""
    x = operands(node)[0]
    dims, keep, dtype = list(_dims(node)), _keeps(node), wide(value(x).dtype)
    count = math.prod(shape(x)[d] for d in dims) if shape(x) else 1
    mean = b(aten.div.Scalar, b(aten.sum.dim_IntList, x, dims, True, dtype=dtype), count)
    away = b(aten.sub.Tensor, x, b(stationary, mean, ""))
    if value(x).is_complex():  # real and imaginary parts count together
        parts = b(aten.view_as_real.default, away)
        squared = b(aten.sum.dim_IntList, b(aten.mul.Tensor, parts, parts), [-1])
    else:
        squared = b(aten.mul.Tensor, away, away)
    squares = b(aten.sum.dim_IntList, squared, dims, keep)
    var = b(aten.div.Scalar, squares, max(count - _correction(node), 0))
    return var, mean if keep or not dims else b(aten.squeeze.dims, mean, dims)


def _expand_var(b: Builder, node: fx.Node) -> fx.Node:
    return b.cast(_variance_and_mean(b, node)[0], value(node).dtype)


def _expand_std(b: Builder, node: fx.Node) -> fx.Node:
    return b.cast(_root(b, _variance_and_mean(b, node)[0]), value(node).dtype)


def _expand_var_mean(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    return tuple(b.cast(v, like.dtype) for v, like in zip(_variance_and_mean(b, node), value(node), strict=True))


def _expand_std_mean(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    var, mean = _variance_and_mean(b, node)
    return tuple(b.cast(v, like.dtype) for v, like in zip((_root(b, var), mean), value(node), strict=True))


def _expand_norm(b: Builder, node: fx.Node) -> fx.Node | None:
    """Norms that are a sum or a maximum of magnitudes: those of order 1, 2 and infinity."""
    x, order = operands(node)[0], argument(node, "ord")
    order = 2.0 if order is None else float(order)
    of_matrix = node.target is aten.linalg_norm.default and argument(node, "ord") is not None and len(_dims(node)) == 2
    if order not in (1.0, 2.0, math.inf) or of_matrix:
        return None
    if not shape(x) or not (value(x).is_floating_point() or value(x).is_complex()):
        return None
    dims, keep = list(_dims(node)), _keeps(node)
    dtype = argument(node, "dtype") or value(x).dtype
    x = b(aten.abs.default, x) if value(x).is_complex() else x
    x = b.cast(x, wide(dtype.to_real()))
    if order == 2:
        norm = _root(b, b(aten.sum.dim_IntList, b(aten.mul.Tensor, x, x), dims, keep))
    elif order == 1:
        norm = b(aten.sum.dim_IntList, b(aten.abs.default, x), dims, keep)
    else:
        norm = b(aten.amax.default, b(aten.abs.default, x), dims, keep)
    return b.cast(norm, value(node).dtype)


def _expand_logsumexp(b: Builder, node: fx.Node) -> fx.Node | None:
    """log(sum of exp(x - m)) + m with m the maximum, as a constant; zero replaces an infinite m."""
    x, dims, keep = operands(node)[0], list(_dims(node)), _keeps(node)
    if not value(x).is_floating_point() or not shape(x):
        return None
    largest = b(aten.amax.default, b(aten.detach.default, x), dims, True)
    largest = b(aten.masked_fill.Scalar, largest, b(aten.isinf.default, largest), 0.0)
    total = b(aten.sum.dim_IntList, b(aten.exp.default, b(aten.sub.Tensor, x, largest)), dims, keep)
    return b(aten.add.Tensor, b(aten.log.default, total), largest if keep else b(aten.squeeze.dims, largest, dims))


def _expand_weight_norm(b: Builder, node: fx.Node) -> fx.Node:
    """v * g / |v|, with the norm over all dims but one."""
    (v, g), dim = operands(node), argument(node, "dim")
    kept = dim % len(shape(v)) if dim != -1 else None
    wider = b.cast(v, wide(value(v).dtype))
    dims = [d for d in range(len(shape(v))) if d != kept]
    norm = _root(b, b(aten.sum.dim_IntList, b(aten.mul.Tensor, wider, wider), dims, True))
    scale = b(aten.div.Tensor, b.cast(g, value(norm).dtype), norm)
    return b(aten.mul.Tensor, v, b.cast(scale, value(node).dtype))


def _expand_extreme(target: Any) -> Expansion:
    """The maximum or minimum of all elements; equal elements share the gradient."""
    return lambda b, node: b(target, operands(node)[0], [])


def _expand_any(b: Builder, node: fx.Node) -> fx.Node | None:
    """Whether some element is not zero: the maximum of ones and zeros."""
    x = operands(node)[0]
    return None if 0 in shape(x) else b.cast(_some(b, node, b(aten.ne.Scalar, x, 0)), value(node).dtype)


def _expand_all(b: Builder, node: fx.Node) -> fx.Node | None:
    """Whether no element is zero."""
    x = operands(node)[0]
    if 0 in shape(x):
        return None
    return b.cast(b(aten.eq.Scalar, _some(b, node, b(aten.eq.Scalar, x, 0)), 0), value(node).dtype)


def _some(b: Builder, node: fx.Node, mask: fx.Node) -> fx.Node:
    return b(aten.amax.default, b.cast(mask, torch.int8), list(_dims(node)), _keeps(node))


def _expand_count_nonzero(b: Builder, node: fx.Node) -> fx.Node:
    return b(aten.sum.dim_IntList, b(aten.ne.Scalar, operands(node)[0], 0), list(_dims(node)))


def _expand_frobenius(b: Builder, node: fx.Node) -> fx.Node | None:
    """A Frobenius norm as a vector norm."""
    if argument(node, "ord") != "fro":
        return None
    x, dims = operands(node)[0], argument(node, "dim")
    every = list(range(len(shape(x)))) if dims is None else list(dims)
    return b(aten.linalg_vector_norm.default, x, 2, every, argument(node, "keepdim"), dtype=argument(node, "dtype"))


ROWS: dict[Any, Row | RowFunction] = {
    aten.amax.default: _reduction_rule,
    aten.amin.default: along("dim"),
    aten.histc.default: _histogram_rule,
    aten.linalg_matrix_norm.default: _matrix_norm_rule,
    aten.linalg_matrix_norm.str_ord: _matrix_norm_rule,
    aten.linalg_norm.default: _matrix_norm_rule,
    aten.linalg_norm.ord_str: _matrix_norm_rule,
    aten.linalg_vector_norm.default: along("dim", fill=1.0),  # the norms that expansion leaves
    aten.logsumexp.default: along("dim"),
    aten.prod.default: along(),
    aten.prod.dim_int: along("dim", fill=1.0),
    aten.sum.default: _reduction_rule,
    aten.sum.dim_IntList: _reduction_rule,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten._is_all_true.default: _expand_all,
    aten._is_any_true.default: _expand_any,
    aten._weight_norm.default: _expand_weight_norm,
    aten.all.default: _expand_all,
    aten.all.dim: _expand_all,
    aten.all.dims: _expand_all,
    aten.any.default: _expand_any,
    aten.any.dim: _expand_any,
    aten.any.dims: _expand_any,
    aten.count_nonzero.default: _expand_count_nonzero,
    aten.count_nonzero.dim_IntList: _expand_count_nonzero,
    aten.histc.default: _expand_histogram,
    aten.linalg_matrix_norm.str_ord: _expand_frobenius,
    aten.linalg_norm.default: _expand_norm,
    aten.linalg_norm.ord_str: _expand_frobenius,
    aten.linalg_vector_norm.default: _expand_norm,
    aten.logsumexp.default: _expand_logsumexp,
    aten.max.default: _expand_extreme(aten.amax.default),
    aten.mean.default: _expand_mean,
    aten.mean.dim: _expand_mean,
    aten.min.default: _expand_extreme(aten.amin.default),
    aten.std.correction: _expand_std,
    aten.std.default: _expand_std,
    aten.std.dim: _expand_std,
    aten.std_mean.correction: _expand_std_mean,
    aten.std_mean.default: _expand_std_mean,
    aten.std_mean.dim: _expand_std_mean,
    aten.var.correction: _expand_var,
    aten.var.default: _expand_var,
    aten.var.dim: _expand_var,
    aten.var_mean.correction: _expand_var_mean,
    aten.var_mean.default: _expand_var_mean,
    aten.var_mean.dim: _expand_var_mean,
}
