"""The rule table: one row per operator (at the bottom), and the functions for rows that are no text.

Pointwise operators share one case; the rest stand alphabetically. A new operator is one row and one test.
An operator without a row still gives right results: it runs replicated (`rule_of` returns None).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..graph.nodes import argument, argument_names, draws_random_numbers, is_tensor, operands, shape, value
from ..ops.batch_norm import moments, normalise, part_norm, sample_moments, statistics
from ..ops.collectives import constrain
from ..ops.cross_entropy import class_terms
from ..ops.dtypes import wide
from ..ops.hooked import hooked, observed
from ..ops.indexing import part_index
from ..ops.random_numbers import draw
from .along import (
    along,
    complex_parts,
    diag_embed,
    histogram,
    members,
    native_norm,
    quantile,
    rows_of_classes,
    searchsorted,
)
from .attention import attention
from .convolution import avg_pool, blocks_of, col2im, convolution, im2col, max_pool, transposed_convolution
from .ctc import CTC
from .custom import Rows, own_rule
from .fourier import FOURIER
from .grouped_matmul import grouped_mm
from .indexing import LOOKUPS, whole
from .linear_algebra import MATRICES
from .norms import whole_groups
from .padded_convolution import padded_convolution
from .recurrent import RECURRENT
from .resampling import interpolation, pad, roll, sliced
from .rule import Dims, Emitter, Row, Rule, parse_row
from .rule import letters_of as _letters
from .rule import sizes_of as _sizes
from .rule import without as _rename

aten = torch.ops.aten
MAXIMA = frozenset({aten.amax.default})  # operators whose result is the largest of what they reduce
Function = Callable[[fx.Node], Rule | None]
_NONE: Rows = {}


def rule_of(node: fx.Node, own: Rows = _NONE) -> Rule | None:
    """The rule of one call, or None for an operator without a row (and for what draws random numbers). `own`: the rows
    that people gave to operators, which go first.

    Raises OperatorError for such a row that does not fit the call."""
    if draws_random_numbers(node):
        return None
    if node.target in own:
        return own_rule(own[node.target], node)
    row = RULES.get(node.target)
    if isinstance(row, Row):
        return parse_row(row, node)
    found = row(node) if row is not None else _pointwise()(node) if is_elementwise(node) else None
    return _with_short_slices(found, node) if found is not None and is_elementwise(node) else found


def _with_short_slices(rule: Rule, node: fx.Node) -> Rule:
    """The rule of an elementwise operator with what it does behind the ends of short slices, where its operands are
    some numbers: it must give numbers, and so must its derivative, since zero times anything else is none."""
    name = str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]
    numbers = all(math.isfinite(a) for a in node.args if isinstance(a, float))
    if name in _STEADY and numbers:
        return rule
    number = next((number for number, names in _STEADY_AT.items() if name in names), None)
    if number is not None and numbers:
        return replace(rule, fill=number)
    return replace(rule, even=frozenset(rule.sizes))


def has_row(operator: Any) -> bool:
    """Whether there is a rule for `operator`, one for all that are tagged as pointwise included."""
    return operator in RULES or torch.Tag.pointwise in getattr(operator, "tags", ())


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result comes from one element of each operand, by the same function."""
    if node.target in RULES:
        return node.target in POINTWISE
    return has_row(node.target) and not draws_random_numbers(node)


# -- helpers of the functions below


def _with_shape(position: int) -> Any:
    """A localizer that puts the local shape of the result at the argument at `position`."""

    def local(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        shape = list(emit.shapes.results[0])
        return emit.call(emit.node.target, *args[:position], shape, *args[position + 1 :], **kwargs)

    return local


# -- functions


def _pointwise(*linear: set[int]) -> Function:
    """Elementwise with broadcasting; `linear` lists the sets of operands that it is jointly linear in."""

    def rule(node: fx.Node) -> Rule | None:
        if not is_tensor(node):
            return None
        out = shape(node)
        letters = _letters(out)
        dims = []
        for operand in operands(node):
            size = shape(operand)
            aligned = letters[len(out) - len(size) :]
            dims.append(tuple(parts if n != 1 else () for parts, n in zip(aligned, size, strict=True)))
        sets = tuple(frozenset(together) for together in linear if max(together) < len(dims))
        return Rule(tuple(dims), (letters,), _sizes(letters, out), linear=sets)

    return rule


def _pair(node: fx.Node) -> Rule:
    """Elementwise with several results."""
    (x,) = operands(node)
    letters = _letters(shape(x))
    return Rule((letters,), (letters,) * len(value(node)), _sizes(letters, shape(x)), fill=1.0)


def _hooked(node: fx.Node) -> Rule:
    """What Python sees: whole tensors, with whole gradients."""
    return replace(whole(node), whole_gradients=True)


def _scalar_linear(node: fx.Node) -> Rule | None:
    """mul, div: by a tensor or by a number."""
    both = node.target in (aten.mul.Tensor,) and len(operands(node)) == 2
    return _pointwise(*([{0}, {1}] if both else [{0}]))(node)


def _additive(node: fx.Node) -> Rule | None:
    """add, sub: jointly linear in two tensors; adding a number is not linear."""
    return _pointwise(*([{0, 1}] if len(operands(node)) == 2 else []))(node)


def _cast(node: fx.Node) -> Rule | None:
    """Linear, but not from a number with a fraction to one without."""
    before, after = value(operands(node)[0]).dtype, value(node).dtype
    return _pointwise(*([] if before.is_floating_point and not after.is_floating_point else [{0}]))(node)


def _where(node: fx.Node) -> Rule | None:
    return _pointwise(*([{1, 2}] if len(operands(node)) == 3 else []))(node)


def _reduction(node: fx.Node) -> Rule | None:
    """Sums and maxima over dims: a split of a summed dim leaves addends, or candidates for the maximum."""
    x = operands(node)[0]
    size, dims = shape(x), argument(node, "dim") if "dim" in argument_names(node) else None
    letters = _letters(size)
    summed = {d % len(size) for d in dims} if dims and size else set(range(len(size)))
    keep = bool(len(shape(node))) and len(shape(node)) == len(size)
    out = _rename(letters, summed) if keep else tuple(p for d, p in enumerate(letters) if d not in summed)
    largest = node.target in MAXIMA
    return Rule(
        (letters,), (out,), _sizes(letters, size), reduce=frozenset(f for d in summed for f in letters[d]),
        reduce_by="max" if largest else "sum", linear=() if largest else (frozenset({0}),),
    )  # fmt: skip


def _view(node: fx.Node) -> Rule | None:
    """view, reshape, flatten, ...: factors are the common refinement of both shapes, major first."""
    x = operands(node)[0]
    before, after = shape(x), shape(node)
    if math.prod(before) == 0:  # there is nothing to split
        return Rule((((),) * len(before),), (((),) * len(after),), {})
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    rest_left, rest_right = list(before), list(after)
    i = j = 0
    while i < len(before) and j < len(after):
        common = math.gcd(rest_left[i], rest_right[j])
        if rest_left[i] == 1 or rest_right[j] == 1:
            i, j = i + (rest_left[i] == 1), j + (rest_right[j] == 1)
        elif common > 1:
            name = f"f{len(sizes)}"
            sizes[name] = common
            left[i].append(name)
            right[j].append(name)
            rest_left[i] //= common
            rest_right[j] //= common
        else:  # nothing in common: these dims stay whole up to where both shapes have covered as much
            a, b = rest_left[i], rest_right[j]
            while a != b:
                if a < b:
                    i += 1
                    a *= before[i]
                else:
                    j += 1
                    b *= after[j]
            i, j = i + 1, j + 1
    dims = zip((*left, *right), (*before, *after), strict=True)
    # a short slice of a factor that only begins a dim is not what the dim's slice is
    begun = frozenset(f for parts, size in dims if math.prod(sizes[f] for f in parts) != size for f in parts)
    return Rule(
        (tuple(map(tuple, left)),), (tuple(map(tuple, right)),), sizes,
        linear=(frozenset({0}),), local=_with_shape(1), even=begun,
    )  # fmt: skip


def _expand(node: fx.Node) -> Rule | None:
    x = operands(node)[0]
    out, size = shape(node), shape(x)
    letters = _letters(out)
    aligned = letters[len(out) - len(size) :]
    dims = tuple(parts if n != 1 else () for parts, n in zip(aligned, size, strict=True))
    return Rule((dims,), (letters,), _sizes(letters, out), linear=(frozenset({0}),), local=_with_shape(1))


def _reorder(order: Callable[[fx.Node, int], list[int]]) -> Function:
    """Permutations: result dim d is operand dim order[d]."""

    def rule(node: fx.Node) -> Rule | None:
        size = shape(operands(node)[0])
        letters = _letters(size)
        out = tuple(letters[d] for d in order(node, len(size)))
        return Rule((letters,), (out,), _sizes(letters, size), linear=(frozenset({0}),))

    return rule


def _transposed(node: fx.Node, n: int) -> list[int]:
    order = list(range(n))
    if n:
        a, b = argument(node, "dim0") % n, argument(node, "dim1") % n
        order[a], order[b] = order[b], order[a]
    return order


def _squeezed(node: fx.Node) -> Rule | None:
    """squeeze, unsqueeze, and any view that only adds or drops dims of size 1."""
    x = operands(node)[0]
    letters = _letters(shape(x))
    rest = [parts for parts in letters if parts]
    out = tuple(() if n == 1 else rest.pop(0) for n in shape(node))
    return Rule((letters,), (out,), _sizes(letters, shape(x)), linear=(frozenset({0}),))


def _cat(node: fx.Node) -> Rule | None:
    parts = operands(node)
    if any(shape(o) == (0,) for o in parts):  # expansion leaves none but where there is nothing else
        return whole(node)
    dim = argument(node, "dim") % len(shape(node))
    letters = _rename(_letters(shape(node)), {dim})
    everything = frozenset(range(len(parts)))
    return Rule((letters,) * len(parts), (letters,), _sizes(letters, shape(node)), linear=(everything,))


def _stack(node: fx.Node) -> Rule | None:
    parts = operands(node)
    dim = argument(node, "dim") % len(shape(node))
    letters = _letters(shape(parts[0]))
    everything = frozenset(range(len(parts)))
    out = (*letters[:dim], (), *letters[dim:])
    return Rule((letters,) * len(parts), (out,), _sizes(letters, shape(parts[0])), linear=(everything,))


def _pieces(node: fx.Node) -> Rule | None:
    """split, unbind: several results, cut along one dim that stays whole."""
    x = operands(node)[0]
    size = shape(x)
    dim = argument(node, "dim") % len(size)
    letters = _rename(_letters(size), {dim})
    results = value(node)
    out = letters if len(results[0].shape) == len(size) else letters[:dim] + letters[dim + 1 :]
    return Rule((letters,), (out,) * len(results), _sizes(letters, size), linear=(frozenset({0}),))


def _layer_norm(node: fx.Node) -> Rule | None:
    x = operands(node)[0]
    size, count = shape(x), len(argument(node, "normalized_shape"))
    letters = _rename(_letters(size), range(len(size) - count, len(size)))
    affine = tuple(((),) * count for _ in operands(node)[1:])
    return Rule((letters, *affine), (letters,), _sizes(letters, size))


def _pool(spatial: int) -> Function:
    """Operators whose last `spatial` dims stay whole: others are independent, the same in all operands."""

    def rule(node: fx.Node) -> Rule | None:
        size = shape(operands(node)[0])
        letters = _rename(_letters(size), range(len(size) - spatial, len(size)))
        results = len(value(node)) if isinstance(value(node), tuple | list) else 1
        indices = len(operands(node)) > 1  # of which there are none behind the ends of short slices
        even = frozenset(_sizes(letters, size)) if indices else frozenset[str]()
        return Rule((letters,) * len(operands(node)), (letters,) * results, _sizes(letters, size), even=even)

    return rule


def _triangle(node: fx.Node) -> Rule | None:
    """tril, triu: where an element of the last two dims is tells whether it is kept."""
    size = shape(node)
    letters = _rename(_letters(size), range(len(size) - 2, len(size)))
    return Rule((letters,), (letters,), _sizes(letters, size), linear=(frozenset({0}),))


def _shuffle(node: fx.Node) -> Rule | None:
    """channel_shuffle: channels (dim 1) stay whole."""
    size = shape(operands(node)[0])
    letters = _rename(_letters(size), {1})
    return Rule((letters,), (letters,), _sizes(letters, size), linear=(frozenset({0}),))


def _cross_entropy(node: fx.Node) -> Rule | None:
    """What expansion leaves of it (class weights, smoothing, probabilities), summed or per element: positions are
    independent, classes stay whole."""
    x, target = operands(node)[:2]
    if argument(node, "reduction") == 1:
        return None
    dim = min(1, len(shape(x)) - 1)  # of the classes
    letters = _rename(_letters(shape(x)), {dim})
    positions = (*letters[:dim], *letters[dim + 1 :])
    weight: tuple[Dims, ...] = tuple(((),) for _ in operands(node)[2:])
    classes = len(shape(target)) == len(shape(x))
    reduced = argument(node, "reduction") == 2
    sizes = _sizes(letters, shape(x))
    return Rule(
        (letters, letters if classes else positions, *weight), (() if reduced else positions,), sizes,
        reduce=frozenset(sizes) if reduced else frozenset(), even=frozenset(sizes if reduced and classes else ()),
        local=_local_cross_entropy if reduced and not classes else None, masks=reduced and not classes,
    )  # fmt: skip


def _local_cross_entropy(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Behind the ends of short slices nothing is asked for."""
    x, target, *rest = args
    for mask in emit.behind(0, x):
        x = emit.call(aten.masked_fill.Scalar, x, mask, 0.0)
    for mask in emit.behind(1, target):
        target = emit.call(aten.masked_fill.Scalar, target, mask, argument(emit.node, "ignore_index"))
    return emit.call(emit.node.target, x, target, *rest, **kwargs)


def _class_terms(node: fx.Node) -> Rule | None:
    """Sums over the classes (dim 1): a part of them gives an addend, the picked class one from the part it is in."""
    size = shape(operands(node)[0])
    letters = _letters(size)
    positions = (letters[0], *letters[2:])
    return Rule(
        (letters, positions, positions), (positions, positions), _sizes(letters, size), reduce=frozenset(letters[1]),
        local=_local_class_terms, masks=True,
    )  # fmt: skip


def _local_class_terms(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A rank that holds a part of the classes is told which. Behind the ends of short slices is some class."""
    x, maximum, target, _, _, *rest = args
    for mask in emit.behind(2, target):
        target = emit.call(aten.masked_fill.Scalar, target, mask, 0)
    return emit.call(class_terms, x, maximum, target, emit.position("f1"), emit.bounds("f1"), *rest, **kwargs)


def _draw(node: fx.Node) -> Rule | None:
    """Random numbers: each is drawn by itself."""
    letters = _letters(shape(node))
    return Rule(((),), (letters,), _sizes(letters, shape(node)), local=_local_draw)


def _local_draw(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A rank is told which part is its own."""
    key, _, _, _, *rest = args
    split = {dim: parts[0] for dim, parts in enumerate(emit.rule.results[0]) if parts and parts[0] in emit.split}
    places = [emit.position(factor) for factor in split.values()]
    cuts = [str(emit.cut(factor)) for factor in split.values()]
    return emit.call(draw, key, places, list(split), cuts, *rest, **kwargs)


def _embedding(node: fx.Node) -> Rule | None:
    """Rows that are split give addends. A sparse gradient takes all rows, one scaled by a row's uses also all uses."""
    row = Row("v d, ... -> ... d", reduce="v", linear=("0",), local=_local_embedding)
    if argument(node, "scale_grad_by_freq"):
        uses = (f"_{i + 1}" for i in range(len(shape(operands(node)[1]))))
        row = replace(row, whole=" ".join(["v", *uses]))
    elif argument(node, "sparse"):
        row = replace(row, whole="v")
    return replace(parse_row(row, node), masks=True)


def _local_embedding(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A rank that holds a part of the rows looks up those, and has zeros for the others."""
    (weight, index, *rest), place = args, emit.position("v")
    for mask in emit.behind(1, index):  # there it may be any number
        index = emit.call(aten.masked_fill.Scalar, index, mask, 0)
    if place is None:
        return emit.call(aten.embedding.default, weight, index, *rest, **kwargs)
    padding = argument(emit.node, "padding_idx")
    local = emit.call(part_index, index, place, emit.bounds("v"))
    found = emit.call(aten.embedding.default, weight, emit.call(aten.clamp.default, local, 0))
    if padding >= 0:  # that row gets no gradient; where it is depends on the rank, so no local padding_idx can say it
        padded = emit.call(aten.unsqueeze.default, emit.call(aten.eq.Scalar, index, padding), -1)
        found = emit.call(aten.where.self, padded, emit.call(aten.detach.default, found), found)
    others = emit.call(aten.unsqueeze.default, emit.call(aten.lt.Scalar, local, 0), -1)
    return emit.call(aten.masked_fill.Scalar, found, others, 0.0)


def _loss(node: fx.Node) -> Rule | None:
    """Pointwise losses, summed or per element; what is summed is zero of zeros (others are sums by expansion)."""
    rule = _pointwise()(node) if argument(node, "reduction") == 0 else None
    if rule is not None or argument(node, "reduction") != 2:
        return rule
    out = tuple(torch.broadcast_shapes(*(shape(o) for o in operands(node))))
    letters = _letters(out)
    dims = tuple(
        tuple(p if n != 1 else () for p, n in zip(letters[len(out) - len(shape(o)) :], shape(o), strict=True))
        for o in operands(node)
    )
    sizes = _sizes(letters, out)
    return Rule(dims, ((),), sizes, reduce=frozenset(sizes))


def _moments(node: fx.Node) -> Rule | None:
    """Sums over all but the channels (dim 1): every part of x has an addend."""
    size = shape(operands(node)[0])
    letters = _letters(size)
    shift = tuple((letters[1],) for _ in operands(node)[1:])
    summed = frozenset(f for parts in (letters[0], *letters[2:]) for f in parts)
    return Rule(
        (letters, *shift), (((), letters[1]),), _sizes(letters, size), reduce=summed, local=_local_moments, masks=True
    )


def _local_moments(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Behind the end of a short slice is what adds nothing: the shift, or zero."""
    x, shift = args
    for mask in emit.behind(0, x):
        if shift is None:
            x = emit.call(aten.masked_fill.Scalar, x, mask, 0.0)
        else:
            size = emit.shapes.operands[1]
            around = [1] * (len(emit.shapes.operands[0]) - 2)
            spread = emit.call(aten.reshape.default, shift, [*([1] if len(size) == 1 else []), *size, *around])
            x = emit.call(aten.where.self, mask, spread, x)
    return emit.call(emit.node.target, x, shift)


def _sample_moments(node: fx.Node) -> Rule | None:
    """Sums over all but the samples (dim 0) and channels (dim 1)."""
    size = shape(operands(node)[0])
    letters = _letters(size)
    shift = tuple(letters[:2] for _ in operands(node)[1:])
    summed = frozenset(f for parts in letters[2:] for f in parts)
    return Rule(
        (letters, *shift), (((), *letters[:2]),), _sizes(letters, size), reduce=summed, even=frozenset(letters[1]),
        local=_local_moments, masks=True,
    )  # fmt: skip


def _statistics(node: fx.Node) -> Rule | None:
    """Each channel (of each sample) by itself."""
    letters = _rename(_letters(shape(node)), {0})
    return Rule((letters, *(letters[1:] for _ in operands(node)[1:])), (letters,), _sizes(letters, shape(node)))


def _normalise(node: fx.Node) -> Rule | None:
    """Each element by itself, with the vectors of its channel (dim 1), of all samples or of its own; linear in x with
    the mean and the bias."""
    size = shape(node)
    letters = _letters(size)
    vectors = (letters[1:2] if len(shape(o)) == 1 else letters[:2] for o in operands(node)[1:])
    bias = frozenset(() if node.args[4] is None else (len(operands(node)) - 1,))
    linear = (bias | {0, 1},)
    even = frozenset(letters[1]) if len(shape(operands(node)[1])) == 2 else frozenset[str]()  # groups are whole
    return Rule(
        (letters, *vectors), (letters,), _sizes(letters, size), additive=bias, linear=linear, local=_local_normalise,
        even=even,
    )  # fmt: skip


def _local_normalise(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Of samples of which a rank has all of each group it is PyTorch's GroupNorm, which computes the moments itself."""
    x, mean, var, weight, bias, eps = args
    groups = whole_groups(x, mean, var, emit.shapes.operands[0][1])
    dtypes = {value(o).dtype for o in operands(emit.node)[3:]} - {value(emit.node).dtype}
    if groups is None or dtypes - {wide(value(emit.node).dtype)}:
        return emit.call(normalise, *args, **kwargs)
    return emit.call(aten.group_norm.default, x, groups, weight, bias, eps, False)


def _part_norm(node: fx.Node) -> Rule | None:
    """Each part of the batch (dim 0) and each channel (dim 2) by itself; the statistics are sums over the parts."""
    size = shape(operands(node)[0])
    letters = _rename(_letters(size), {1, *range(3, len(size))})
    part, _, channel, *_ = letters
    vectors, kept = ((channel,) for _ in operands(node)[1:]), (part, channel)
    results = (letters, ((), channel), kept, kept)
    even = frozenset((*part, *channel))
    return Rule((letters, *vectors), results, _sizes(letters, size), reduce=frozenset(part), even=even)


def _group_norm(node: fx.Node) -> Rule | None:
    x = operands(node)[0]
    letters = _rename(_letters(shape(x)), range(1, len(shape(x))))
    return Rule((letters, *(((),) for _ in operands(node)[1:])), (letters,), _sizes(letters, shape(x)))


# Elementwise operators that make finite numbers of finite numbers, with finite derivatives; and those that do of one.
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

_UNARY_LINEAR = _pointwise({0})
_LINEAR = ("0 2", "1 2")

# pointwise operators that are linear in an operand, or that PyTorch does not tag as pointwise
POINTWISE: dict[Any, Function] = {
    aten._prelu_kernel.default: _pointwise(),  # without the tag
    aten._to_copy.default: _cast,
    aten.add.Tensor: _additive,
    aten.alias.default: _UNARY_LINEAR,
    aten.clone.default: _UNARY_LINEAR,
    aten.complex.default: _pointwise({0, 1}),
    aten.conj_physical.default: _UNARY_LINEAR,
    aten.detach.default: _UNARY_LINEAR,
    aten.div.Scalar: _UNARY_LINEAR,
    aten.div.Tensor: _UNARY_LINEAR,
    aten.floor_divide.default: _pointwise(),  # without the tag
    aten.hardswish.default: _pointwise(),  # without the tag
    aten.leaky_relu.default: _pointwise(),  # without the tag in torch 2.11
    aten.log_sigmoid.default: _pointwise(),  # without the tag
    aten.masked_fill.Scalar: _pointwise(),
    aten.mul.Scalar: _UNARY_LINEAR,
    aten.mul.Tensor: _scalar_linear,
    aten.neg.default: _UNARY_LINEAR,
    aten.polar.default: _pointwise({0}),
    aten.rsub.Scalar: _pointwise(),
    aten.special_ndtr.default: _pointwise(),  # without the tag
    aten.special_polygamma.default: _pointwise(),  # without the tag
    aten.sub.Tensor: _additive,
    aten.where.self: _where,
}

RULES: dict[Any, Row | Function] = {
    **CTC,
    **FOURIER,
    **LOOKUPS,
    **MATRICES,
    **RECURRENT,
    **POINTWISE,
    # the rest, alphabetically
    aten._grouped_mm.default: grouped_mm,
    aten._safe_softmax.default: along("dim"),
    aten._softmax.default: along("dim"),
    aten._softmax_backward_data.default: along("dim"),
    aten._upsample_bicubic2d_aa.default: _pool(2),
    aten._upsample_bicubic2d_aa.vec: _pool(2),
    aten._upsample_bilinear2d_aa.default: _pool(2),
    aten._upsample_bilinear2d_aa.vec: _pool(2),
    aten._upsample_nearest_exact1d.vec: interpolation,
    aten._upsample_nearest_exact2d.vec: interpolation,
    aten._upsample_nearest_exact3d.vec: interpolation,
    aten.adaptive_max_pool1d.default: _pool(1),
    aten.adaptive_max_pool2d.default: _pool(2),
    aten.adaptive_max_pool3d.default: _pool(3),
    aten.amax.default: _reduction,
    aten.amin.default: along("dim"),
    aten.aminmax.default: along("dim"),
    aten.argmax.default: along("dim"),
    aten.argmin.default: along("dim"),
    aten.avg_pool1d.default: avg_pool,
    aten.avg_pool2d.default: avg_pool,
    aten.avg_pool3d.default: avg_pool,
    aten.binary_cross_entropy.default: _loss,
    aten.binary_cross_entropy_with_logits.default: _loss,
    aten.bucketize.Tensor: searchsorted,
    aten.cat.default: _cat,
    aten.channel_shuffle.default: _shuffle,
    aten.col2im.default: col2im,
    aten.constant_pad_nd.default: pad,
    aten.conv1d.default: convolution,
    aten.conv1d.padding: convolution,
    aten.conv2d.default: convolution,
    aten.conv2d.padding: convolution,
    aten.conv3d.default: convolution,
    aten.conv3d.padding: convolution,
    aten.conv_transpose1d.default: transposed_convolution,
    aten.conv_transpose2d.input: transposed_convolution,
    aten.conv_transpose3d.input: transposed_convolution,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.cummax.default: along("dim"),
    aten.cummin.default: along("dim"),
    aten.cumprod.default: along("dim"),
    aten.cumsum.default: along("dim", linear=True),
    aten.diag_embed.default: diag_embed,
    aten.diagonal.default: along("dim1", "dim2", linear=True),
    aten.diagonal_scatter.default: along("dim1", "dim2", linear=True),
    aten.embedding.default: _embedding,
    aten.embedding_bag.default: whole,
    aten.embedding_bag.padding_idx: whole,
    aten.expand.default: _expand,
    aten.flip.default: along("dims", linear=True),
    aten.frexp.Tensor: _pair,
    aten.glu.default: along("dim"),
    aten.grid_sampler_2d.default: Row("n c i j, n h w t -> n c h w", whole="i j t", linear=("0",), fill=0.0),
    aten.grid_sampler_3d.default: Row("n c i j k, n d h w t -> n c d h w", whole="i j k t", linear=("0",), fill=0.0),
    aten.group_norm.default: _group_norm,
    aten.histc.default: histogram,
    aten.huber_loss.default: _loss,
    aten.im2col.default: im2col,
    aten.isin.Tensor_Scalar: members,
    aten.isin.Tensor_Tensor: members,
    aten.kl_div.default: _loss,
    aten.kthvalue.default: along("dim"),
    aten.l1_loss.default: _loss,
    aten.layer_norm.default: _layer_norm,
    aten.linalg_vector_norm.default: along("dim", fill=1.0),  # the norms that expansion leaves
    aten.linear.default: Row("... k, n k, +n -> ... n", reduce="k", linear=_LINEAR, contraction=True),
    aten.log_softmax.int: along("dim"),
    aten.logcumsumexp.default: along("dim"),
    aten.logsumexp.default: along("dim"),
    aten.max.dim: along("dim"),
    aten.max_pool1d.default: max_pool,
    aten.max_pool1d_with_indices.default: max_pool,
    aten.max_pool2d.default: max_pool,
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool3d.default: max_pool,
    aten.max_pool3d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: _pool(2),
    aten.max_unpool2d.default: _pool(2),
    aten.max_unpool3d.default: _pool(3),
    aten.median.default: along(),
    aten.median.dim: along("dim"),
    aten.min.dim: along("dim"),
    aten.mode.default: along("dim"),
    aten.mse_loss.default: _loss,
    aten.multilabel_margin_loss.default: rows_of_classes,
    aten.nanmedian.default: along(),
    aten.nanmedian.dim: along("dim"),
    aten.nanquantile.default: quantile,
    aten.nanquantile.scalar: quantile,
    aten.native_group_norm.default: native_norm,
    aten.native_layer_norm.default: native_norm,
    aten.nll_loss_nd.default: _cross_entropy,
    aten.pad.default: pad,
    aten.permute.default: _reorder(lambda node, n: [d % n for d in argument(node, "dims")]),
    aten.pixel_shuffle.default: Row("... (c p q) h w -> ... c (h p) (w q)", linear=("0",)),
    aten.pixel_unshuffle.default: Row("... c (h p) (w q) -> ... (c p q) h w", linear=("0",)),
    aten.prod.default: along(),
    aten.prod.dim_int: along("dim", fill=1.0),
    aten.quantile.default: quantile,
    aten.quantile.scalar: quantile,
    aten.reshape.default: _view,
    aten.rms_norm.default: _layer_norm,
    aten.roll.default: roll,
    aten.scaled_dot_product_attention.default: attention,
    aten.searchsorted.Tensor: searchsorted,
    aten.select_scatter.default: along("dim", linear=True),
    aten.slice.Tensor: sliced,
    aten.slice_scatter.default: along("dim", linear=True),
    aten.smooth_l1_loss.default: _loss,
    aten.soft_margin_loss.default: _loss,
    aten.softmax.int: along("dim"),
    aten.sort.default: along("dim"),
    aten.sort.stable: along("dim"),
    aten.split.Tensor: _pieces,
    aten.split_with_sizes.default: _pieces,
    aten.squeeze.dims: _squeezed,
    aten.stack.default: _stack,
    aten.sum.default: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.t.default: _reorder(lambda node, n: list(range(n))[::-1]),
    aten.topk.default: along("dim"),
    aten.transpose.int: _reorder(_transposed),
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten.unbind.int: _pieces,
    aten.unfold.default: blocks_of,
    aten.unsqueeze.default: _squeezed,
    aten.upsample_bicubic2d.vec: interpolation,
    aten.upsample_bilinear2d.vec: interpolation,
    aten.upsample_linear1d.vec: interpolation,
    aten.upsample_nearest1d.vec: interpolation,
    aten.upsample_nearest2d.vec: interpolation,
    aten.upsample_nearest3d.vec: interpolation,
    aten.upsample_trilinear3d.vec: interpolation,
    aten.view_as_complex.default: complex_parts,
    aten.view_as_real.default: complex_parts,
    class_terms: _class_terms,
    constrain: _UNARY_LINEAR,
    draw: _draw,
    hooked: _hooked,
    moments: _moments,
    normalise: _normalise,
    observed: _hooked,
    padded_convolution: convolution,
    part_norm: _part_norm,
    sample_moments: _sample_moments,
    statistics: _statistics,
}
