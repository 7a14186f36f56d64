"""The rule table: one row per operator (at the bottom), and the functions for rows that are no text.

Pointwise operators share one case; the rest stand alphabetically. A new operator is one row and one test.
An operator without a row still gives right results: it runs replicated (`rule_of` returns None).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .absorb import padded_convolution
from .batch_norm import moments, normalise, part_norm, sample_moments, statistics
from .collectives import constrain
from .graph import argument, argument_names, draws_random_numbers, is_tensor, operands, shape, value
from .indexing import class_terms, part_index, wide
from .norms import whole_groups
from .resampling import interpolation, pad, roll, sliced
from .rule import Dims, Emitter, Row, Rule, parse_row
from .spatial import avg_pool, blocks_of, col2im, convolution, im2col, max_pool, transposed_convolution

aten = torch.ops.aten
MAXIMA = frozenset({aten.amax.default})  # operators whose result is the largest of what they reduce
Function = Callable[[fx.Node], Rule | None]


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of one call, or None for an operator without a row (and for what draws random numbers)."""
    if draws_random_numbers(node):
        return None
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
    if name in _STEADY_AT_ONE and numbers:
        return replace(rule, fill=1.0)
    return replace(rule, even=frozenset(rule.sizes))


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result comes from one element of each operand, by the same function."""
    if node.target in RULES:
        return node.target in POINTWISE
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not draws_random_numbers(node)


# -- helpers of the functions below


def _letters(size: Iterable[int], prefix: str = "f") -> Dims:
    """One factor for each dim, none for a dim of size 1."""
    return tuple((f"{prefix}{d}",) if extent != 1 else () for d, extent in enumerate(size))


def _sizes(dims: Dims, size: tuple[int, ...]) -> dict[str, int]:
    return {parts[0]: extent for parts, extent in zip(dims, size, strict=True) if len(parts) == 1}


def _rename(dims: Dims, whole: Iterable[int]) -> Dims:
    dropped = set(whole)
    return tuple(() if d in dropped else parts for d, parts in enumerate(dims))


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


def _addmm(node: fx.Node) -> Rule | None:
    """The addend is of any shape that broadcasts to the result, and enters the sum over k once."""
    addend = shape(operands(node)[0])
    dims = " ".join(f if n != 1 else "1" for f, n in zip("mn"[2 - len(addend) :], addend, strict=True))
    row = Row(f"+{dims}, m k, k n -> m n", reduce="k", linear=("0 1", "0 2"), contraction=True)
    return parse_row(row, node)


def _along(*names: str, linear: bool = False) -> Function:
    """Operators that work along the dims given by the arguments `names`; other dims are independent."""

    def rule(node: fx.Node) -> Rule | None:
        if not is_tensor(node):
            return None
        size = shape(operands(node)[0])
        whole: set[int] = set()
        for name in names:
            dims = argument(node, name)
            for dim in dims if isinstance(dims, list | tuple) else [dims]:
                whole.add(dim % max(len(size), 1))
        letters = _rename(_letters(size), whole)
        out = _rename(letters, {d for d in range(len(size)) if shape(node)[d] != size[d]})
        sets = (frozenset({0}),) if linear else ()
        # of numbers that are all minus infinity a softmax makes none
        return Rule((letters,), (out,), _sizes(letters, size), linear=sets, fill=None if linear else 0.0)

    return rule


def _position(node: fx.Node) -> Rule | None:
    """argmax, argmin, max and min of one dim: that dim stays whole."""
    size, dim = shape(operands(node)[0]), argument(node, "dim")
    if dim is None or not size:
        return None
    letters = _rename(_letters(size), {dim % len(size)})
    found = value(node) if isinstance(value(node), tuple | list) else (value(node),)
    kept = len(found[0].shape) == len(size)
    out = letters if kept else (*letters[: dim % len(size)], *letters[dim % len(size) + 1 :])
    return Rule((letters,), (out,) * len(found), _sizes(letters, size))


def _gather(node: fx.Node) -> Rule | None:
    """One element of a dim, which stays whole, for each index; along the others an index may be a part of x."""
    x, index = operands(node)
    size = shape(index)
    if not size:
        return None
    dim = argument(node, "dim") % len(size)
    partial = {d for d, (n, m) in enumerate(zip(shape(x), size, strict=True)) if n != m}
    letters = _rename(_letters(size), partial | {dim})
    # behind the end of a short slice an index may be any number, also one that x does not have
    return Rule((letters, letters), (letters,), _sizes(letters, size), linear=(frozenset({0}),), fill=0.0)


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
    if math.prod(before) == 0:
        return None
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
    return Rule(
        (tuple(map(tuple, left)),), (tuple(map(tuple, right)),), sizes,
        linear=(frozenset({0}),), local=_with_shape(1),
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


def _select(node: fx.Node) -> Rule | None:
    x = operands(node)[0]
    size = shape(x)
    letters = _rename(_letters(size), {argument(node, "dim") % len(size)})
    dim = argument(node, "dim") % len(size)
    return Rule((letters,), (letters[:dim] + letters[dim + 1 :],), _sizes(letters, size), linear=(frozenset({0}),))


def _cat(node: fx.Node) -> Rule | None:
    parts = [o for o in operands(node) if shape(o) != (0,)]
    if len(parts) != len(operands(node)):
        return None
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


def _matmul(node: fx.Node) -> Rule | None:
    a, b = (shape(o) for o in operands(node))
    if len(a) == 1 or len(b) == 1:
        return None
    out = shape(node)
    batch = _letters(out[:-2])

    def dims(size: tuple[int, ...], last: Dims) -> Dims:
        lead = batch[len(batch) - (len(size) - 2) :]
        return (*(p if n != 1 else () for p, n in zip(lead, size[:-2], strict=True)), *last)

    sizes = {**_sizes(batch, out[:-2]), "m": a[-2], "k": a[-1], "n": b[-1]}
    return Rule(
        (dims(a, (("m",), ("k",))), dims(b, (("k",), ("n",)))), ((*batch, ("m",), ("n",)),), sizes,
        reduce=frozenset("k"), linear=(frozenset({0}), frozenset({1})), flops=2.0 * math.prod(sizes.values()),
    )  # fmt: skip


def _einsum(node: fx.Node) -> Rule | None:
    equation = argument(node, "equation").replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in [*terms, right]):
        return None
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands(node), strict=True):
        sizes.update(zip(term, shape(operand), strict=True))
    return Rule(
        tuple(tuple((letter,) for letter in term) for term in terms), (tuple((letter,) for letter in right),), sizes,
        reduce=frozenset(sizes) - frozenset(right), linear=tuple(frozenset({i}) for i in range(len(terms))),
        flops=2.0 * math.prod(sizes.values()),
    )  # fmt: skip


def _attention(node: fx.Node) -> Rule | None:
    """scaled_dot_product_attention: batch and heads, and queries where no mask ties them to positions."""
    if argument(node, "dropout_p"):
        return None
    q, k, v = operands(node)[:3]
    mask = operands(node)[3] if len(operands(node)) > 3 else None
    size = shape(q)
    if len(size) < 3 or shape(k)[:-3] != size[:-3]:
        return None
    batch = _letters(size[:-3], "b")
    sizes = {**_sizes(batch, size[:-3]), "h": shape(k)[-3], "g": size[-3] // shape(k)[-3], "s": size[-2]}
    heads = tuple(f for f in ("h", "g") if sizes[f] != 1)
    queries = () if argument(node, "is_causal") else ("s",)
    kv = (*batch, ("h",) if sizes["h"] != 1 else (), (), ())
    dims: list[Dims] = [(*batch, heads, queries, ()), kv, kv]
    if mask is not None:
        full: Dims = (*batch, heads, queries, ())
        aligned = full[len(full) - len(shape(mask)) :]
        dims.append(tuple(p if n != 1 else () for p, n in zip(aligned, shape(mask), strict=True)))
    if argument(node, "is_causal"):
        del sizes["s"]
    flops = 2.0 * math.prod(size[:-1]) * shape(k)[-2] * (size[-1] + shape(v)[-1])
    # a mask may hide all keys behind the end of a short slice, and a softmax of nothing is no number
    even = frozenset[str]() if mask is None else frozenset(sizes)
    return Rule(tuple(dims), ((*batch, heads, queries, ()),), sizes, flops=flops, even=even)


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
        reduce=frozenset(sizes) if reduced else frozenset(),
    )  # fmt: skip


def _class_terms(node: fx.Node) -> Rule | None:
    """Sums over the classes (dim 1): a part of them gives an addend, the picked class one from the part it is in."""
    size = shape(operands(node)[0])
    letters = _letters(size)
    positions = (letters[0], *letters[2:])
    return Rule(
        (letters, positions, positions), (positions, positions), _sizes(letters, size), reduce=frozenset(letters[1]),
        local=_local_class_terms,
    )  # fmt: skip


def _local_class_terms(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A rank that holds a part of the classes is told which. Behind the ends of short slices is some class."""
    x, maximum, target, _, *rest = args
    for mask in emit.behind(2, target):
        target = emit.call(aten.masked_fill.Scalar, target, mask, 0)
    return emit.call(class_terms, x, maximum, target, emit.part("f1")[1], *rest, **kwargs)


def _embedding(node: fx.Node) -> Rule | None:
    """Rows that are split give addends. A sparse gradient takes all rows, one scaled by a row's uses also all uses."""
    row = Row("v d, ... -> ... d", reduce="v", linear=("0",), local=_local_embedding)
    if argument(node, "scale_grad_by_freq"):
        uses = (f"_{i + 1}" for i in range(len(shape(operands(node)[1]))))
        row = replace(row, whole=" ".join(["v", *uses]))
    elif argument(node, "sparse"):
        row = replace(row, whole="v")
    return replace(parse_row(row, node), fill=0.0)  # behind the end of a short slice an index may be any number


def _local_embedding(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A rank that holds a part of the rows looks up those, and has zeros for the others."""
    parts, place = emit.part("v")
    if place is None:
        return emit.call(aten.embedding.default, *args, **kwargs)
    weight, index = args[:2]
    rows, padding = emit.shapes.operands[0][0], argument(emit.node, "padding_idx")
    local = emit.call(part_index, index, place, rows, rows * parts)
    found = emit.call(aten.embedding.default, weight, emit.call(aten.clamp.default, local, 0))
    if padding >= 0:  # that row gets no gradient; where it is depends on the rank, so no local padding_idx can say it
        padded = emit.call(aten.unsqueeze.default, emit.call(aten.eq.Scalar, index, padding), -1)
        found = emit.call(aten.where.self, padded, emit.call(aten.detach.default, found), found)
    others = emit.call(aten.unsqueeze.default, emit.call(aten.lt.Scalar, local, 0), -1)
    return emit.call(aten.masked_fill.Scalar, found, others, 0.0)


def _loss(node: fx.Node) -> Rule | None:
    """Pointwise losses, summed or per element."""
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


# Elementwise operators that make finite numbers of finite numbers, with finite derivatives; and those that do of ones.
_STEADY = frozenset([
    "_to_copy", "abs", "add", "alias", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "celu", "ceil",
    "clamp", "clamp_max", "clamp_min", "clone", "cos", "detach", "elu", "eq", "erf", "floor", "ge", "gelu", "gt",
    "hardsigmoid", "hardswish", "hardtanh", "le", "leaky_relu", "lerp", "log_sigmoid", "logical_and", "logical_not",
    "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "ne", "neg", "relu", "relu6",
    "round", "rsub", "selu", "sgn", "sigmoid", "sign", "silu", "sin", "softplus", "softshrink", "square", "sub", "tanh",
    "threshold", "trunc", "where",
])  # fmt: skip
_STEADY_AT_ONE = frozenset([
    "atan", "atan2", "cosh", "div", "exp", "exp2", "expm1", "floor_divide", "fmod", "lgamma", "log", "log10", "log1p",
    "log2", "logaddexp", "logaddexp2", "pow", "reciprocal", "remainder", "rsqrt", "sinh", "sqrt", "tan", "xlogy",
])  # fmt: skip

_UNARY_LINEAR = _pointwise({0})
_LINEAR = ("0 2", "1 2")

# pointwise operators that are linear in an operand, or that PyTorch does not tag as pointwise
POINTWISE: dict[Any, Function] = {
    aten._to_copy.default: _cast,
    aten.add.Tensor: _additive,
    aten.alias.default: _UNARY_LINEAR,
    aten.clone.default: _UNARY_LINEAR,
    aten.detach.default: _UNARY_LINEAR,
    aten.div.Scalar: _UNARY_LINEAR,
    aten.div.Tensor: _UNARY_LINEAR,
    aten.hardswish.default: _pointwise(),  # without the tag
    aten.leaky_relu.default: _pointwise(),  # without the tag in torch 2.11
    aten.masked_fill.Scalar: _pointwise(),
    aten.mul.Scalar: _UNARY_LINEAR,
    aten.mul.Tensor: _scalar_linear,
    aten.neg.default: _UNARY_LINEAR,
    aten.rsub.Scalar: _pointwise(),
    aten.sub.Tensor: _additive,
    aten.where.self: _where,
}

RULES: dict[Any, Row | Function] = {
    **POINTWISE,
    # the rest, alphabetically
    aten._softmax.default: _along("dim"),
    aten._upsample_bicubic2d_aa.vec: _pool(2),
    aten._upsample_bilinear2d_aa.vec: _pool(2),
    aten._upsample_nearest_exact1d.vec: interpolation,
    aten._upsample_nearest_exact2d.vec: interpolation,
    aten._upsample_nearest_exact3d.vec: interpolation,
    aten.adaptive_max_pool1d.default: _pool(1),
    aten.adaptive_max_pool2d.default: _pool(2),
    aten.adaptive_max_pool3d.default: _pool(3),
    aten.addmm.default: _addmm,
    aten.amax.default: _reduction,
    aten.argmax.default: _position,
    aten.argmin.default: _position,
    aten.avg_pool1d.default: avg_pool,
    aten.avg_pool2d.default: avg_pool,
    aten.avg_pool3d.default: avg_pool,
    aten.binary_cross_entropy.default: _loss,
    aten.binary_cross_entropy_with_logits.default: _loss,
    aten.bmm.default: Row("b m k, b k n -> b m n", reduce="k", linear=("0", "1"), contraction=True),
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
    aten.cumsum.default: _along("dim", linear=True),
    aten.einsum.default: _einsum,
    aten.embedding.default: _embedding,
    aten.expand.default: _expand,
    aten.flip.default: _along("dims", linear=True),
    aten.gather.default: _gather,
    aten.group_norm.default: _group_norm,
    aten.huber_loss.default: _loss,
    aten.im2col.default: im2col,
    aten.kl_div.default: _loss,
    aten.l1_loss.default: _loss,
    aten.layer_norm.default: _layer_norm,
    aten.linear.default: Row("... k, n k, +n -> ... n", reduce="k", linear=_LINEAR, contraction=True),
    aten.log_softmax.int: _along("dim"),
    aten.matmul.default: _matmul,
    aten.max.dim: _position,
    aten.max_pool1d.default: max_pool,
    aten.max_pool1d_with_indices.default: max_pool,
    aten.max_pool2d.default: max_pool,
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool3d.default: max_pool,
    aten.max_pool3d_with_indices.default: max_pool,
    aten.max_unpool2d.default: _pool(2),
    aten.max_unpool3d.default: _pool(3),
    aten.min.dim: _position,
    aten.mm.default: Row("m k, k n -> m n", reduce="k", linear=("0", "1"), contraction=True),
    aten.mse_loss.default: _loss,
    aten.nll_loss_nd.default: _cross_entropy,
    aten.pad.default: pad,
    aten.permute.default: _reorder(lambda node, n: [d % n for d in argument(node, "dims")]),
    aten.pixel_shuffle.default: Row("... (c p q) h w -> ... c (h p) (w q)", linear=("0",)),
    aten.pixel_unshuffle.default: Row("... c (h p) (w q) -> ... (c p q) h w", linear=("0",)),
    aten.reshape.default: _view,
    aten.rms_norm.default: _layer_norm,
    aten.roll.default: roll,
    aten.scaled_dot_product_attention.default: _attention,
    aten.select.int: _select,
    aten.slice.Tensor: sliced,
    aten.smooth_l1_loss.default: _loss,
    aten.soft_margin_loss.default: _loss,
    aten.softmax.int: _along("dim"),
    aten.split.Tensor: _pieces,
    aten.split_with_sizes.default: _pieces,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.stack.default: _stack,
    aten.sum.default: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.t.default: _reorder(lambda node, n: list(range(n))[::-1]),
    aten.transpose.int: _reorder(_transposed),
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
    class_terms: _class_terms,
    constrain: _UNARY_LINEAR,
    moments: _moments,
    normalise: _normalise,
    padded_convolution: convolution,
    part_norm: _part_norm,
    sample_moments: _sample_moments,
    statistics: _statistics,
}
