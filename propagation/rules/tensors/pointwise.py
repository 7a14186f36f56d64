"""Elementwise operators, and their values in the padding of uneven shards.

Operators that PyTorch tags as pointwise need no row here, unless they are linear in an operand. `_STEADY` and
`_STEADY_AT` list by name those that may be split unevenly: in the padding of an uneven shard an operand is any number,
or a chosen one, and a result or derivative that is not finite there would turn sums into NaN. Operators in neither list
split only evenly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...graph.nodes import is_tensor, operands, shape, value
from ...ops.collectives import constrain
from ...ops.constants import stationary
from ...torch_internals import schema_of
from ..builder import Builder, Expansion
from ..dims import broadcast, letters_of, sizes_of
from ..row import Row, RowFunction
from ..rule import Rule

aten = torch.ops.aten

# -- Rules


def pointwise(*linear: set[int]) -> RowFunction:
    """Elementwise with broadcasting; `linear` lists the sets of operands in which it is jointly linear."""

    def rule(node: fx.Node) -> Rule | None:
        if not is_tensor(node):
            return None
        out = shape(node)
        letters = letters_of(out)
        dims = tuple(broadcast(letters, shape(operand)) for operand in operands(node))
        sets = tuple(frozenset(together) for together in linear if max(together) < len(dims))
        return Rule(dims, (letters,), sizes_of(letters, out), linear=sets)

    return rule


def _frexp_rule(node: fx.Node) -> Rule:
    """frexp: elementwise with several results."""
    (x,) = operands(node)
    letters = letters_of(shape(x))
    return Rule((letters,), (letters,) * len(value(node)), sizes_of(letters, shape(x)), fill=1.0)


def _product_rule(node: fx.Node) -> Rule | None:
    """mul, div: by a tensor or by a number."""
    both = node.target is aten.mul.Tensor and len(operands(node)) == 2
    return pointwise(*([{0}, {1}] if both else [{0}]))(node)


def _sum_rule(node: fx.Node) -> Rule | None:
    """add, sub: jointly linear in two tensors; adding a number is not linear."""
    return pointwise(*([{0, 1}] if len(operands(node)) == 2 else []))(node)


def _where_rule(node: fx.Node) -> Rule | None:
    """where: jointly linear in the two tensors that it chooses from."""
    return pointwise(*([{1, 2}] if len(operands(node)) == 3 else []))(node)


_UNARY_LINEAR = pointwise({0})

# Operators that are linear in an operand, or that PyTorch does not tag as pointwise.
ELEMENTWISE: dict[Any, RowFunction] = {
    aten._prelu_kernel.default: pointwise(),  # without the tag
    aten._to_copy.default: _UNARY_LINEAR,
    aten.add.Tensor: _sum_rule,
    aten.alias.default: _UNARY_LINEAR,
    aten.clone.default: _UNARY_LINEAR,
    aten.complex.default: pointwise({0, 1}),
    aten.conj_physical.default: _UNARY_LINEAR,
    aten.detach.default: _UNARY_LINEAR,
    aten.div.Scalar: _UNARY_LINEAR,
    aten.div.Tensor: _UNARY_LINEAR,
    aten.floor_divide.default: pointwise(),  # without the tag
    aten.hardswish.default: pointwise(),  # without the tag
    aten.leaky_relu.default: pointwise(),  # without the tag in torch 2.11
    aten.log_sigmoid.default: pointwise(),  # without the tag
    aten.masked_fill.Scalar: pointwise(),
    aten.mul.Scalar: _UNARY_LINEAR,
    aten.mul.Tensor: _product_rule,
    aten.neg.default: _UNARY_LINEAR,
    aten.polar.default: pointwise({0}),
    aten.rsub.Scalar: pointwise(),
    aten.special_ndtr.default: pointwise(),  # without the tag
    aten.special_polygamma.default: pointwise(),  # without the tag
    aten.sub.Tensor: _sum_rule,
    aten.where.self: _where_rule,
}

# -- The padding of uneven shards

# Operators with finite values and derivatives for all finite numbers; and those for which one number is a safe fill.
_STEADY = frozenset([
    "_prelu_kernel", "_to_copy", "abs", "add", "addcmul", "alias", "asinh", "bitwise_and", "bitwise_left_shift",
    "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max",
    "clamp_min", "clone", "complex", "conj_physical", "copysign", "cos", "deg2rad", "detach", "elu", "eq", "erf",
    "erfc", "floor", "fmax", "fmin", "frac", "gcd", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh",
    "heaviside", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "lcm", "le", "leaky_relu", "lerp",
    "log_sigmoid", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "max", "maximum",
    "min", "minimum", "mish", "mul", "nan_to_num", "native_dropout_backward", "ne", "neg", "nextafter", "polar",
    "rad2deg", "relu", "relu6", "round", "rsub", "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc",
    "softplus", "softshrink", "special_ndtr", "square", "sub", "tanh", "threshold", "trunc", "where",
])  # fmt: skip
_STEADY_AT = {
    1.0: frozenset([
        "addcdiv", "atan", "atan2", "cosh", "digamma", "div", "exp", "exp2", "expm1", "float_power", "floor_divide",
        "fmod", "hypot", "i0", "igamma", "igammac", "ldexp", "lgamma", "log", "log10", "log1p", "log2", "logaddexp",
        "logaddexp2", "polygamma", "pow", "reciprocal", "remainder", "rsqrt", "sinh", "special_bessel_j0",
        "special_bessel_j1", "special_chebyshev_polynomial_t", "special_chebyshev_polynomial_u",
        "special_chebyshev_polynomial_v", "special_chebyshev_polynomial_w", "special_entr", "special_erfcx",
        "special_hermite_polynomial_h", "special_hermite_polynomial_he", "special_i0e", "special_i1", "special_i1e",
        "special_laguerre_polynomial_l", "special_legendre_polynomial_p", "special_log_ndtr", "special_polygamma",
        "special_shifted_chebyshev_polynomial_t", "special_shifted_chebyshev_polynomial_u",
        "special_shifted_chebyshev_polynomial_v", "special_shifted_chebyshev_polynomial_w", "special_xlog1py", "sqrt",
        "tan", "true_divide", "xlogy",
    ]),
    0.5: frozenset(["acos", "asin", "atanh", "erfinv", "logit", "special_ndtri"]),
    4.0: frozenset(["acosh", "mvlgamma", "special_zeta"]),
}  # fmt: skip


def fill_padding(rule: Rule, node: fx.Node) -> Rule:
    """`rule` of the elementwise operator `node`, with the number to fill the padding of uneven shards with, or with
    factors that split only evenly. (Zero times a value or a derivative that is not finite is not zero.)"""
    name = str(schema_of(node.target).name).removeprefix("aten::")
    finite = all(math.isfinite(a) for a in node.args if isinstance(a, float))
    if name in _STEADY and finite:
        return rule
    number = next((number for number, names in _STEADY_AT.items() if name in names), None)
    if number is not None and finite:
        return replace(rule, fill=number)
    return replace(rule, even=frozenset(rule.sizes))


# -- Expansions


def _expand_type_as(b: Builder, node: fx.Node) -> fx.Node:
    """The first tensor in the dtype of the second."""
    return b.cast(operands(node)[0], value(node).dtype)


def _called(target: Any) -> Expansion:
    """An operator by its other name."""
    return lambda b, node: b(target, *node.args, **node.kwargs)


# Other names of operators that have rows.
_ALIASES = {
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten._conj.default: aten.conj_physical.default,  # at once, as collectives send memory as it is
    aten._neg_view.default: aten.neg.default,
    aten.divide.Scalar: aten.div.Scalar,
    aten.divide.Tensor: aten.div.Tensor,
    aten.multiply.Scalar: aten.mul.Scalar,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.subtract.Scalar: aten.sub.Scalar,
    aten.subtract.Tensor: aten.sub.Tensor,
}

ROWS: dict[Any, Row | RowFunction] = {
    **ELEMENTWISE,
    aten.frexp.Tensor: _frexp_rule,
    constrain: _UNARY_LINEAR,
    stationary: _UNARY_LINEAR,
}

EXPANSIONS: dict[Any, Expansion] = {
    **{name: _called(target) for name, target in _ALIASES.items()},
    aten.type_as.default: _expand_type_as,
}
