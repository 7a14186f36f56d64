"""Reductions that are not linear, by sums: variances, norms, and the logarithm of a sum of exponentials.

They are computed in float32 where the tensor is of a lower precision, as PyTorch's kernels do inside. At zero, where a
square root has no derivative, a standard deviation and a norm have a gradient of zeros, as PyTorch's have.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..graph.nodes import argument, argument_names, operands, shape, value
from ..ops.dtypes import wide
from .builder import Builder, Expansion

aten = torch.ops.aten


def _dims(node: fx.Node) -> tuple[int, ...]:
    """The dims that a call reduces, all where it names none."""
    count = len(shape(operands(node)[0]))
    dims = argument(node, "dim") if "dim" in argument_names(node) else None
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(d % max(count, 1) for d in dims) if dims else tuple(range(count))


def _keeps(node: fx.Node) -> bool:
    return bool("keepdim" in argument_names(node) and argument(node, "keepdim"))


def _correction(node: fx.Node) -> float:
    """By how much the divisor of a variance is less than the count."""
    if "unbiased" in argument_names(node):
        return float(argument(node, "unbiased"))
    given = argument(node, "correction")
    return 1.0 if given is None else float(given)


def _root(b: Builder, x: fx.Node) -> fx.Node:
    """The square root, with a gradient of zero at zero."""
    zero = b(aten.eq.Scalar, x, 0)
    return b(aten.masked_fill.Scalar, b(aten.sqrt.default, b(aten.masked_fill.Scalar, x, zero, 1.0)), zero, 0.0)


def _moments(b: Builder, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Variance and mean. The squares are about the mean as a constant: a variance does not change with what it is
    about, so that its gradient needs no sum over the ranks."""
    x = operands(node)[0]
    dims, keep, dtype = list(_dims(node)), _keeps(node), wide(value(x).dtype)
    count = math.prod(shape(x)[d] for d in dims) if shape(x) else 1
    mean = b(aten.div.Scalar, b(aten.sum.dim_IntList, x, dims, True, dtype=dtype), count)
    away = b(aten.sub.Tensor, x, b(aten.detach.default, mean))
    if value(x).is_complex():  # real and imaginary parts count together
        parts = b(aten.view_as_real.default, away)
        squared = b(aten.sum.dim_IntList, b(aten.mul.Tensor, parts, parts), [-1])
    else:
        squared = b(aten.mul.Tensor, away, away)
    squares = b(aten.sum.dim_IntList, squared, dims, keep)
    var = b(aten.div.Scalar, squares, max(count - _correction(node), 0))
    return var, mean if keep or not dims else b(aten.squeeze.dims, mean, dims)


def _var(b: Builder, node: fx.Node) -> fx.Node:
    return b.cast(_moments(b, node)[0], value(node).dtype)


def _std(b: Builder, node: fx.Node) -> fx.Node:
    return b.cast(_root(b, _moments(b, node)[0]), value(node).dtype)


def _var_mean(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    return tuple(b.cast(v, like.dtype) for v, like in zip(_moments(b, node), value(node), strict=True))


def _std_mean(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    var, mean = _moments(b, node)
    return tuple(b.cast(v, like.dtype) for v, like in zip((_root(b, var), mean), value(node), strict=True))


def _norm(b: Builder, node: fx.Node) -> fx.Node | None:
    """The norms that are a sum or a maximum of magnitudes: of order 1, 2 and infinity."""
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
        found = _root(b, b(aten.sum.dim_IntList, b(aten.mul.Tensor, x, x), dims, keep))
    elif order == 1:
        found = b(aten.sum.dim_IntList, b(aten.abs.default, x), dims, keep)
    else:
        found = b(aten.amax.default, b(aten.abs.default, x), dims, keep)
    return b.cast(found, value(node).dtype)


def _logsumexp(b: Builder, node: fx.Node) -> fx.Node | None:
    """log(sum of exp(x - m)) + m with m the largest, a constant; an infinite m is no help."""
    x, dims, keep = operands(node)[0], list(_dims(node)), _keeps(node)
    if not value(x).is_floating_point() or not shape(x):
        return None
    largest = b(aten.amax.default, b(aten.detach.default, x), dims, True)
    largest = b(aten.masked_fill.Scalar, largest, b(aten.isinf.default, largest), 0.0)
    total = b(aten.sum.dim_IntList, b(aten.exp.default, b(aten.sub.Tensor, x, largest)), dims, keep)
    return b(aten.add.Tensor, b(aten.log.default, total), largest if keep else b(aten.squeeze.dims, largest, dims))


def _weight_norm(b: Builder, node: fx.Node) -> fx.Node:
    """v * g / |v|, with the norm over all dims but one."""
    (v, g), dim = operands(node), argument(node, "dim")
    kept = dim % len(shape(v)) if dim != -1 else None
    wider = b.cast(v, wide(value(v).dtype))
    dims = [d for d in range(len(shape(v))) if d != kept]
    norm = _root(b, b(aten.sum.dim_IntList, b(aten.mul.Tensor, wider, wider), dims, True))
    scale = b(aten.div.Tensor, b.cast(g, value(norm).dtype), norm)
    return b(aten.mul.Tensor, v, b.cast(scale, value(node).dtype))


def _extreme(target: Any) -> Expansion:
    """The largest or least of all elements, of which equal ones share the gradient."""
    return lambda b, node: b(target, operands(node)[0], [])


def _any(b: Builder, node: fx.Node) -> fx.Node | None:
    """Whether some element is not zero: the largest of ones and zeros."""
    x = operands(node)[0]
    return None if 0 in shape(x) else b.cast(_some(b, node, b(aten.ne.Scalar, x, 0)), value(node).dtype)


def _all(b: Builder, node: fx.Node) -> fx.Node | None:
    """Whether no element is zero."""
    x = operands(node)[0]
    if 0 in shape(x):
        return None
    return b.cast(b(aten.eq.Scalar, _some(b, node, b(aten.eq.Scalar, x, 0)), 0), value(node).dtype)


def _some(b: Builder, node: fx.Node, mask: fx.Node) -> fx.Node:
    return b(aten.amax.default, b.cast(mask, torch.int8), list(_dims(node)), _keeps(node))


def _count_nonzero(b: Builder, node: fx.Node) -> fx.Node:
    return b(aten.sum.dim_IntList, b(aten.ne.Scalar, operands(node)[0], 0), list(_dims(node)))


REDUCTIONS: dict[Any, Expansion] = {
    aten._is_all_true.default: _all,
    aten._is_any_true.default: _any,
    aten._weight_norm.default: _weight_norm,
    aten.all.default: _all,
    aten.all.dim: _all,
    aten.all.dims: _all,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.linalg_norm.default: _norm,
    aten.linalg_vector_norm.default: _norm,
    aten.logsumexp.default: _logsumexp,
    aten.max.default: _extreme(aten.amax.default),
    aten.min.default: _extreme(aten.amin.default),
    aten.std.correction: _std,
    aten.std.default: _std,
    aten.std.dim: _std,
    aten.std_mean.correction: _std_mean,
    aten.std_mean.default: _std_mean,
    aten.std_mean.dim: _std_mean,
    aten.var.correction: _var,
    aten.var.default: _var,
    aten.var.dim: _var,
    aten.var_mean.correction: _var_mean,
    aten.var_mean.default: _var_mean,
    aten.var_mean.dim: _var_mean,
}
