"""Losses: cross entropy, the pointwise losses, and CTC.

A mean is a sum divided by the global number of elements, or of valid targets. Cross entropy of plain classes uses
`class_terms` (`ops/cross_entropy.py`), sums over the classes, so that logits with split classes are never gathered.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, is_tensor, operands, shape, value
from ...ops.cross_entropy import class_terms
from ...ops.ctc import ctc
from ...ops.dtypes import wide
from ...torch_internals import chunked_losses
from ..builder import Builder, Expansion
from ..dims import broadcast, letters_of, sizes_of, without
from ..row import Row, RowFunction, parse_row
from ..rule import Dims, Emitter, Rule
from ..tensors.pointwise import pointwise

aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # torch.nn._reduction's codes
_REDUCTIONS = {"none": 0, "mean": _MEAN, "sum": _SUM}

# Losses that are not zero for zero operands, as in the padding of uneven shards, and so are summed apart.
_SUMMED_APART = (
    aten.binary_cross_entropy_with_logits.default,
    aten.multilabel_margin_loss.default,
    aten.soft_margin_loss.default,
)

# Operators that only move elements, so that a cast may come after them.
_MOVES = {
    aten._unsafe_view.default, aten.clone.default, aten.flatten.using_ints, aten.permute.default, aten.reshape.default,
    aten.slice.Tensor, aten.squeeze.dim, aten.transpose.int, aten.unsqueeze.default, aten.view.default,
}  # fmt: skip

# -- Rules


def _cross_entropy_rule(node: fx.Node) -> Rule | None:
    """Losses that expansion leaves (class weights, smoothing, probabilities), summed or per element: positions are
    independent, classes stay whole."""
    x, target = operands(node)[:2]
    if argument(node, "reduction") == 1:
        return None
    dim = min(1, len(shape(x)) - 1)  # of the classes
    letters = without(letters_of(shape(x)), {dim})
    positions = (*letters[:dim], *letters[dim + 1 :])
    weight: tuple[Dims, ...] = tuple(((),) for _ in operands(node)[2:])
    classes = len(shape(target)) == len(shape(x))
    reduced = argument(node, "reduction") == 2
    sizes = sizes_of(letters, shape(x))
    return Rule(
        (letters, letters if classes else positions, *weight),
        (() if reduced else positions,),
        sizes,
        reduce=frozenset(sizes) if reduced else frozenset(),
        even=frozenset(sizes if reduced and classes else ()),
        local=_local_cross_entropy if reduced and not classes else None,
        masks=reduced and not classes,
    )


def _local_cross_entropy(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Set the target to the ignored class in the padding of uneven shards."""
    x, target, *rest = args
    for mask in emit.padding_masks(0, x):
        x = emit.call(aten.masked_fill.Scalar, x, mask, 0.0)
    for mask in emit.padding_masks(1, target):
        target = emit.call(aten.masked_fill.Scalar, target, mask, argument(emit.node, "ignore_index"))
    return emit.call(emit.node.target, x, target, *rest, **kwargs)


def _class_terms_rule(node: fx.Node) -> Rule | None:
    """Sums over the classes (dim 1), to which each part has an addend; the picked class is in one part."""
    size = shape(operands(node)[0])
    letters = letters_of(size)
    positions = (letters[0], *letters[2:])
    return Rule(
        (letters, positions, positions),
        (positions, positions),
        sizes_of(letters, size),
        reduce=frozenset(letters[1]),
        local=_local_class_terms,
        masks=True,
    )


def _local_class_terms(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Pass the bounds of the rank's classes. In the padding of uneven shards the target is set to class 0."""
    x, maximum, target, _, _, *rest = args
    for mask in emit.padding_masks(2, target):
        target = emit.call(aten.masked_fill.Scalar, target, mask, 0)
    return emit.call(class_terms, x, maximum, target, emit.position("f1"), emit.bounds("f1"), *rest, **kwargs)


def _loss_rule(node: fx.Node) -> Rule | None:
    """Pointwise losses, summed or per element. Summed losses are zero for zero operands (expansion sums the others
    apart)."""
    rule = pointwise()(node) if argument(node, "reduction") == 0 else None
    if rule is not None or argument(node, "reduction") != 2:
        return rule
    out = tuple(torch.broadcast_shapes(*(shape(o) for o in operands(node))))
    letters = letters_of(out)
    sizes = sizes_of(letters, out)
    return Rule(tuple(broadcast(letters, shape(o)) for o in operands(node)), ((),), sizes, reduce=frozenset(sizes))


def _rows_of_classes_rule(node: fx.Node) -> Rule:
    """multilabel_margin_loss per sample: its classes stay whole."""
    size = shape(operands(node)[0])
    letters = without(letters_of(size), {len(size) - 1})
    return Rule((letters, letters), (letters[:-1],), sizes_of(letters, size), fill=0.0)


def _ctc_rule(node: fx.Node) -> Rule:
    """Sequences split, unless their labels are concatenated."""
    in_a_row = len(shape(operands(node)[1])) == 1
    return parse_row(Row("1 1 1, 1, 1, 1 -> 1" if in_a_row else "1 n 1, n 1, n, n -> n"), node)


# -- Expansions


def _expand_cross_entropy(b: Builder, node: fx.Node) -> fx.Node | None:
    """A mean over valid targets is the sum over them divided by their number, or by the sum of their weights."""
    x, target = operands(node)[:2]
    plain = argument(node, "weight") is None and not argument(node, "label_smoothing")
    if plain and not value(target).dtype.is_floating_point:
        return _class_cross_entropy(b, node, x)
    return _mean_over_targets(b, node)


def _expand_linear_cross_entropy(b: Builder, node: fx.Node) -> fx.Node | tuple[fx.Node | None, ...]:
    """The cross entropy of a linear layer, in chunks of the batch or not. (The other results of PyTorch's operator are
    gradients computed in advance.)"""
    names, (x, weight, target) = argument_names(node), operands(node)[:3]
    reduction = _REDUCTIONS[argument(node, "reduction")] if "reduction" in names else 0
    smoothing = argument(node, "label_smoothing") if "label_smoothing" in names else 0.0
    logits = b(aten.linear.default, x, weight, argument(node, "linear_bias"))
    classes, ignored = argument(node, "weight"), argument(node, "ignore_index")
    loss = b(aten.cross_entropy_loss.default, logits, target, classes, reduction, ignored, smoothing)
    return (loss, None, None, None) if isinstance(value(node), tuple | list) else loss


def _expand_nll(b: Builder, node: fx.Node) -> fx.Node | None:
    """Cross entropy, if the operand is a log_softmax that nothing else reads."""
    x = operands(node)[0]
    if x.target is aten.log_softmax.int and len(x.users) == 1 and argument(node, "weight") is None:
        along, dtype = argument(x, "dim") % max(len(shape(x)), 1), argument(x, "dtype")
        if along == min(1, len(shape(x)) - 1) and dtype in (None, value(operands(x)[0]).dtype):
            return _class_cross_entropy(b, node, operands(x)[0])
    return _mean_over_targets(b, node)


def _class_cross_entropy(b: Builder, node: fx.Node, x: fx.Node) -> fx.Node:
    """log(sum of exp(x - m)) - (x - m)[target] with m the largest logit: sums over the classes."""
    target, dtype, reduction = operands(node)[1], value(x).dtype, argument(node, "reduction")
    x = _before_widening(b, x)
    single = len(shape(x)) == 1
    if single:
        x, target = b(aten.unsqueeze.default, x, 0), b(aten.unsqueeze.default, target, 0)
    largest = b(aten.amax.default, b(aten.detach.default, x), [1])
    ignored = argument(node, "ignore_index")
    terms = b(class_terms, x, largest, target, None, [0, shape(x)[1]], ignored)
    total, picked = b(operator.getitem, terms, 0), b(operator.getitem, terms, 1)
    loss = b(aten.sub.Tensor, b(aten.log.default, total), picked)
    loss = b(aten.masked_fill.Scalar, loss, b(aten.eq.Scalar, target, ignored), 0.0)
    every = list(range(len(shape(loss))))
    if reduction in (_MEAN, _SUM):
        loss = b(aten.sum.dim_IntList, loss, every)
    elif single:
        loss = b(aten.squeeze.dim, loss, 0)
    if reduction == _MEAN:
        valid = b(aten._to_copy.default, b(aten.ne.Scalar, target, ignored), dtype=wide(dtype))
        loss = b(aten.div.Tensor, loss, b(aten.sum.dim_IntList, valid, every))
    return b.cast(loss, dtype)


def _before_widening(b: Builder, x: fx.Node) -> fx.Node:
    """`x` before a cast to the dtype in which `class_terms` computes anyway, if only the loss reads it: models cast
    their logits to float32 for the loss, and the copy would be the largest value of a step."""
    moves, cast = [], x
    while cast.target in _MOVES and len(cast.users) == 1:
        moves.append(cast)
        cast = operands(cast)[0]
    if cast.target is not aten._to_copy.default or len(cast.users) > 1 or cast.kwargs.keys() != {"dtype"}:
        return x
    narrow = operands(cast)[0]
    before, after = value(narrow), value(cast)
    if after.dtype == before.dtype or wide(before.dtype) != after.dtype or before.stride() != after.stride():
        return x
    for move in reversed(moves):
        narrow = b(move.target, narrow, *move.args[1:], **move.kwargs)
    return narrow


def _mean_over_targets(b: Builder, node: fx.Node) -> fx.Node | None:
    """The sum over the valid targets, divided by their global number, or by the sum of their weights."""
    if argument(node, "reduction") != _MEAN:
        return None
    (x, target), weight = operands(node)[:2], argument(node, "weight")
    ignored = argument(node, "ignore_index") if "ignore_index" in argument_names(node) else -100
    rest = {
        name: argument(node, name)
        for name in ("weight", "ignore_index", "label_smoothing")
        if name in argument_names(node) and argument(node, name) is not None
    }
    total = b(node.target, x, target, reduction=_SUM, **rest)
    if value(target).dtype.is_floating_point:  # class probabilities: every position counts
        return b(aten.div.Scalar, total, math.prod(shape(target)) // shape(target)[min(1, len(shape(target)) - 1)])
    valid = b(aten.ne.Scalar, target, ignored)
    if weight is None:
        counted = b(aten._to_copy.default, valid, dtype=value(total).dtype)
    else:
        safe = b(aten.mul.Tensor, target, valid)
        counted = b(
            aten.mul.Tensor,
            b(aten.embedding.default, b(aten.unsqueeze.default, weight, 1), safe),
            b(aten.unsqueeze.default, valid, -1),
        )
    every = list(range(len(shape(counted))))
    return b(aten.div.Tensor, total, b(aten.sum.dim_IntList, counted, every) if every else counted)


def _expand_pointwise_loss(b: Builder, node: fx.Node) -> fx.Node | None:
    """A loss of elements (or of rows) with reduction="mean" is its sum over their global number."""
    reduction, apart = argument(node, "reduction"), node.target in _SUMMED_APART
    if node.target is aten.multilabel_margin_loss.default and len(shape(operands(node)[0])) < 2:
        # One sample: with reduction "none" PyTorch's meta kernel gives [1], and its kernel [].
        return None if reduction else b(node.target, *node.args[:2], reduction=_SUM)
    if reduction not in ((_MEAN, _SUM) if apart else (_MEAN,)):
        return None
    rest = {
        name: argument(node, name)
        for name in argument_names(node)[2:]
        if name != "reduction" and argument(node, name) is not None
    }
    each = b(node.target, *node.args[:2], reduction=0 if apart else _SUM, **rest)
    total = b(aten.sum.default, each) if apart else each
    if reduction == _SUM:
        return total
    size = torch.broadcast_shapes(*(shape(a) for a in node.args[:2] if is_tensor(a)))  # type: ignore[arg-type]
    return b(aten.div.Scalar, total, math.prod(shape(each) if apart else size))


ROWS: dict[Any, Row | RowFunction] = {
    aten.binary_cross_entropy.default: _loss_rule,
    aten.binary_cross_entropy_with_logits.default: _loss_rule,
    aten.cross_entropy_loss.default: _cross_entropy_rule,
    aten.huber_loss.default: _loss_rule,
    aten.kl_div.default: _loss_rule,
    aten.l1_loss.default: _loss_rule,
    aten.mse_loss.default: _loss_rule,
    aten.multilabel_margin_loss.default: _rows_of_classes_rule,
    aten.nll_loss_nd.default: _cross_entropy_rule,
    aten.smooth_l1_loss.default: _loss_rule,
    aten.soft_margin_loss.default: _loss_rule,
    class_terms: _class_terms_rule,
    ctc: _ctc_rule,
}

EXPANSIONS: dict[Any, Expansion] = {
    **dict.fromkeys(chunked_losses, _expand_linear_cross_entropy),
    aten.binary_cross_entropy.default: _expand_pointwise_loss,
    aten.binary_cross_entropy_with_logits.default: _expand_pointwise_loss,
    aten.cross_entropy_loss.default: _expand_cross_entropy,
    aten.huber_loss.default: _expand_pointwise_loss,
    aten.kl_div.default: _expand_pointwise_loss,
    aten.l1_loss.default: _expand_pointwise_loss,
    aten.mse_loss.default: _expand_pointwise_loss,
    aten.multilabel_margin_loss.default: _expand_pointwise_loss,
    aten.nll_loss_nd.default: _expand_nll,
    aten.smooth_l1_loss.default: _expand_pointwise_loss,
    aten.soft_margin_loss.default: _expand_pointwise_loss,
}
