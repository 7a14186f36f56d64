"""Operators whose value is not a function of local parts become operators whose value is.

A mean is a sum divided by the *global* count; batch statistics are sums; a loss that averages over its valid
targets is a sum over a count. After this pass each of them is split like any sum, and the conversions of the
placement algebra do the rest (the local element count never enters). One row in `EXPANSIONS` per operator.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ...strategy.errors import StrategyError
from ..graph.nodes import argument, argument_names, is_tensor, module_path, operands, shape, source_line, value
from ..ops.batch_norm import moments, normalise, part_norm, statistics
from ..ops.cross_entropy import class_terms
from ..ops.dtypes import wide
from ..ops.random_numbers import RandomNumbers, bernoulli
from ..torch_internals import chunked_losses
from .adaptive_pools import POOLS
from .builder import Builder, Expansion
from .embedding_bag import BAGS
from .fourier import FOURIER_EXPANSIONS
from .indexing import LOOKUP_EXPANSIONS
from .linear_algebra import MATRIX_EXPANSIONS
from .norms import NORMS
from .random import DRAWN_BY_TORCH, RANDOM, Keys, drawn, fresh
from .recurrent import RECURRENT_EXPANSIONS
from .reductions import REDUCTIONS

aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # torch.nn._reduction's codes
_REDUCTIONS = {"none": 0, "mean": _MEAN, "sum": _SUM}


def expand(
    module: fx.GraphModule, batch_norm_parts: int = 1, random_numbers: RandomNumbers = RandomNumbers.COUNTER,
    own: Collection[Any] = (),
) -> dict[fx.Node, fx.Node]:  # fmt: skip
    """Replace every node of `module` that has a row in EXPANSIONS (in place; capture owns the module), but for
    operators in `own`, and what it is replaced by in turn.

    Returns for each input that an operator wrote to, unseen by torch.export, what it is in the end. Raises
    StrategyError for a BatchNorm in training whose batch `batch_norm_parts` does not divide.
    """
    written: dict[fx.Node, fx.Node] = {}
    torchs = random_numbers is RandomNumbers.TORCH
    keys = None if torchs else Keys(module.graph, stream=random_numbers is RandomNumbers.RANK)
    table = {**EXPANSIONS, **(DRAWN_BY_TORCH if torchs else RANDOM)}
    left = deque(module.graph.nodes)
    while left:
        node = left.popleft()
        row = table.get(node.target) if node.op == "call_function" else None
        if row is None or node.target in own:
            continue
        builder = Builder(module.graph, node, batch_norm_parts, written, keys)
        new = row(builder, node)
        left.extendleft(reversed(builder.made))
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
        elif new is not None:  # several results: each getitem takes its own
            for item in list(node.users):
                replacement = new[item.args[1]]
                if replacement is not None:
                    item.replace_all_uses_with(replacement)
                    module.graph.erase_node(item)
        if new is not None and not node.users:
            module.graph.erase_node(node)
    return {old: new for old, new in written.items() if old.op == "placeholder"}


def _mean(b: Builder, node: fx.Node) -> fx.Node:
    x = operands(node)[0]
    dims = argument(node, "dim") if "dim" in argument_names(node) else None
    every = tuple(range(len(shape(x))))
    dims = [d % len(every) for d in dims] if dims and every else list(every)
    keep = argument(node, "keepdim") if "keepdim" in argument_names(node) else False
    total = b(aten.sum.dim_IntList, x, dims, keep, dtype=argument(node, "dtype"))
    return b(aten.div.Scalar, total, math.prod(shape(x)[d] for d in dims))


def _batch_norm(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    """aten._native_batch_norm_legit_functional: (y, saved mean, saved rstd, new mean, new var)."""
    x, weight, bias, old_mean, old_var, training, momentum, eps = node.args[:8]
    return _batch_norm_of(b, node, x, weight, bias, old_mean, old_var, training, momentum, eps)


def _batch_norm_eval(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    x, weight, bias, mean, var, momentum, eps = node.args[:7]
    return _batch_norm_of(b, node, x, weight, bias, mean, var, False, momentum, eps)


def _batch_norm_stateless(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    x, weight, bias, training, momentum, eps = node.args[:6]
    return _batch_norm_of(b, node, x, weight, bias, None, None, training, momentum, eps)


def _batch_norm_of(
    b: Builder, node: fx.Node, x: Any, weight: Any, bias: Any, old_mean: Any, old_var: Any, training: Any,
    momentum: Any, eps: Any,
) -> tuple[fx.Node | None, ...]:  # fmt: skip
    """In training the statistics are those of the moments, which are sums over the whole batch (`batch_norm.py`), or
    of each part of the batch."""
    if training and b.batch_norm_parts > 1 and not _is_synchronised(node):
        _check_parts(node, b.batch_norm_parts)
        return _part_norm_of(b, x, weight, bias, old_mean, old_var, momentum, eps)
    mean, var, new_mean, new_var = old_mean, old_var, old_mean, old_var
    if training:
        dims = [d for d in range(len(shape(x))) if d != 1]
        count, dtype = math.prod(shape(x)[d] for d in dims), wide(value(x).dtype)
        shift = None
        if dtype == torch.float64:
            shift = b(aten.div.Scalar, b(aten.sum.dim_IntList, b(aten.detach.default, x), dims), count)
        found = b(statistics, b(moments, x, shift), shift, count, dtype)
        both = b(aten.unbind.int, found)
        mean, var = b(operator.getitem, both, 0), b(operator.getitem, both, 1)
        if old_mean is not None:
            unbiased = b(aten.mul.Scalar, b(aten.detach.default, var), count / max(count - 1, 1))
            new_mean = _blend(b, old_mean, b(aten.detach.default, mean), momentum)
            new_var = _blend(b, old_var, unbiased, momentum)
    y = b(normalise, x, mean, var, weight, bias, eps)
    said = value(node)[1]
    if not training and said.shape == (0,):
        empty = b(aten.zeros.default, [0], dtype=said.dtype, device=said.device)
        return (y, empty, empty, new_mean, new_var)
    mean, var = (b(aten.detach.default, s) for s in (mean, var))  # no gradient comes by what is said of them
    rstd = b(aten.rsqrt.default, b(aten.add.Scalar, var, eps))
    return (y, mean, rstd, new_mean, new_var)


def _part_norm_of(
    b: Builder, x: Any, weight: Any, bias: Any, old_mean: Any, old_var: Any, momentum: Any, eps: Any
) -> tuple[fx.Node | None, ...]:
    """Each part of the batch by its own statistics; what is kept of them is their mean over the parts."""
    parts, (batch, *rest) = b.batch_norm_parts, shape(x)
    split = b(aten.reshape.default, x, [parts, batch // parts, *rest])
    found = b(part_norm, split, weight, bias, parts, eps)
    y = b(aten.reshape.default, b(operator.getitem, found, 0), [batch, *rest])
    both = b(aten.unbind.int, b(aten.detach.default, b(operator.getitem, found, 1)))
    mean, var = b(operator.getitem, both, 0), b(operator.getitem, both, 1)
    new_mean, new_var = None, None
    if old_mean is not None:
        new_mean, new_var = _blend(b, old_mean, mean, momentum), _blend(b, old_var, var, momentum)
    each = b(aten.detach.default, b(operator.getitem, found, 3))
    rstd = b(aten.div.Scalar, b(aten.sum.dim_IntList, each, [0]), parts)
    return (y, mean, rstd, new_mean, new_var)


def _is_synchronised(node: fx.Node) -> bool:
    """Whether `node` is a SyncBatchNorm's, which asks for the statistics of the whole batch."""
    kinds = (kind for _, kind in (node.meta.get("nn_module_stack") or {}).values())
    return any(str(kind).endswith(".SyncBatchNorm") for kind in kinds)


def _check_parts(node: fx.Node, parts: int) -> None:
    """Raise StrategyError unless each of so many parts of the batch has statistics of its own."""
    size = shape(operands(node)[0])
    part = [size[0] / parts, *size[2:]]
    if size[0] % parts:
        what = "does not divide that batch; give a multiple of it (the last batch of an epoch: DataLoader's drop_last)"
    elif math.prod(part) == 1:
        what = "leaves one value per channel and part, which has no variance; give a larger batch"
    else:
        return
    where, line = module_path(node) or "the function", source_line(node)
    raise StrategyError(
        f"the BatchNorm in {where} gets a batch of {size[0]} (its input is {list(size)}), and batch_norm_parts={parts} "
        f"{what}, or set batch_norm_parts to {_parts_of(size)}" + (f"\n  at {line}" if line else "")
    )


def _parts_of(size: tuple[int, ...]) -> str:
    """The numbers of parts with statistics that a batch can be cut into, as text."""
    found = [str(n) for n in range(1, size[0] + 1) if size[0] % n == 0 and math.prod(size) != n * size[1]]
    return " or ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)


def _blend(b: Builder, old: Any, new: Any, momentum: Any) -> fx.Node:
    return b(aten.lerp.Scalar, old, b.cast(new, value(old).dtype), momentum)


def _cross_entropy(b: Builder, node: fx.Node) -> fx.Node | None:
    """A mean over valid targets is the sum over them divided by their number (by their weights, if any)."""
    x, target = operands(node)[:2]
    plain = argument(node, "weight") is None and not argument(node, "label_smoothing")
    if plain and not value(target).dtype.is_floating_point:
        return _class_cross_entropy(b, node, x)
    return _mean_over_targets(b, node)


def _linear_cross_entropy(b: Builder, node: fx.Node) -> fx.Node | tuple[fx.Node | None, ...]:
    """In chunks of the batch or not, it is the cross entropy of a linear layer. (What PyTorch's operator has beside
    the loss are gradients made in advance.)"""
    names, (x, weight, target) = argument_names(node), operands(node)[:3]
    reduction = _REDUCTIONS[argument(node, "reduction")] if "reduction" in names else 0
    smoothing = argument(node, "label_smoothing") if "label_smoothing" in names else 0.0
    logits = b(aten.linear.default, x, weight, argument(node, "linear_bias"))
    classes, ignored = argument(node, "weight"), argument(node, "ignore_index")
    loss = b(aten.cross_entropy_loss.default, logits, target, classes, reduction, ignored, smoothing)
    return (loss, None, None, None) if isinstance(value(node), tuple | list) else loss


def _nll(b: Builder, node: fx.Node) -> fx.Node | None:
    """Of a log_softmax that nothing else reads it is cross entropy."""
    x = operands(node)[0]
    if x.target is aten.log_softmax.int and len(x.users) == 1 and argument(node, "weight") is None:
        along, dtype = argument(x, "dim") % max(len(shape(x)), 1), argument(x, "dtype")
        if along == min(1, len(shape(x)) - 1) and dtype in (None, value(operands(x)[0]).dtype):
            return _class_cross_entropy(b, node, operands(x)[0])
    return _mean_over_targets(b, node)


def _class_cross_entropy(b: Builder, node: fx.Node, x: fx.Node) -> fx.Node:
    """log(sum of exp(x - m)) - (x - m)[target] with m the largest logit: sums over the classes (`indexing.py`)."""
    target, dtype, reduction = operands(node)[1], value(x).dtype, argument(node, "reduction")
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


def _mean_over_targets(b: Builder, node: fx.Node) -> fx.Node | None:
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
        counted = b(aten.mul.Tensor, b(aten.embedding.default, b(aten.unsqueeze.default, weight, 1), safe),
                    b(aten.unsqueeze.default, valid, -1))  # fmt: skip
    every = list(range(len(shape(counted))))
    return b(aten.div.Tensor, total, b(aten.sum.dim_IntList, counted, every) if every else counted)


# Losses that are not zero of zeros, which stand behind the ends of short slices of what is summed.
_SUMMED_APART = (
    aten.binary_cross_entropy_with_logits.default, aten.multilabel_margin_loss.default, aten.soft_margin_loss.default,
)  # fmt: skip


def _pointwise_loss(b: Builder, node: fx.Node) -> fx.Node | None:
    """A loss of elements (or of rows) with reduction="mean" is its sum over their global number."""
    reduction, apart = argument(node, "reduction"), node.target in _SUMMED_APART
    if node.target is aten.multilabel_margin_loss.default and len(shape(operands(node)[0])) < 2:
        # One sample. Of reduction "none" PyTorch's meta kernel gives [1], and its kernel [].
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


def _native_dropout(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...] | None:
    """The mask depends on nothing of x, so that every layout of x has its part of the same one."""
    x, p, train = operands(node)[0], argument(node, "p"), argument(node, "train")
    if not train or p == 0:
        return (x, b(aten.ones.default, list(shape(x)), dtype=torch.bool, device=value(x).device))
    return _dropped(b, x, p)


def _dropped(b: Builder, x: fx.Node, p: float) -> tuple[fx.Node, fx.Node]:
    """x * mask / (1 - p), and the mask."""
    if b.keys is None:  # the numbers that PyTorch itself would draw
        kept = b(bernoulli, fresh(b, value(x), value(x).dtype), 1 - p)
        return b(aten.mul.Tensor, x, b(aten.div.Scalar, kept, 1 - p if p < 1 else 1)), b(aten.ne.Scalar, kept, 0)
    mask = drawn(b, "bernoulli", [1 - p], shape(x), torch.bool, x)
    return b(aten.mul.Scalar, b(aten.mul.Tensor, x, mask), 1 / (1 - p) if p < 1 else 0.0), mask


def _attention(b: Builder, node: fx.Node) -> fx.Node | None:
    """With dropout, attention is written out: its mask is then one for all layouts, as in `_native_dropout`."""
    p = argument(node, "dropout_p")
    q, k, v = operands(node)[:3]
    if not p:
        return None
    if argument(node, "enable_gqa"):
        k, v = (_repeated(b, x, shape(q)[-3]) for x in (k, v))
    mask, scale = argument(node, "attn_mask"), argument(node, "scale")
    scores = b(aten.matmul.default, q, b(aten.transpose.int, k, len(shape(k)) - 2, len(shape(k)) - 1))
    scores = b(aten.mul.Scalar, scores, shape(q)[-1] ** -0.5 if scale is None else scale)
    if argument(node, "is_causal"):
        ones = b(aten.ones.default, list(shape(scores)[-2:]), dtype=torch.bool, device=value(q).device)
        mask = b(aten.tril.default, ones)
    if mask is not None and value(mask).dtype is torch.bool:
        scores = b(aten.masked_fill.Scalar, scores, b(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = b(aten.add.Tensor, scores, mask)
    weights = b(aten._safe_softmax.default, scores, len(shape(scores)) - 1)  # zeros where a mask hides all
    return b(aten.matmul.default, _dropped(b, weights, p)[0], v)


def _repeated(b: Builder, x: fx.Node, heads: int) -> fx.Node:
    """Keys or values with each of their heads so often that there are as many as `heads`."""
    *batch, own, length, width = shape(x)
    each = b(aten.expand.default, b(aten.unsqueeze.default, x, -3), [*batch, own, heads // own, length, width])
    return b(aten.reshape.default, each, [*batch, heads, length, width])


def _broadcast_tensors(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Each tensor by itself, expanded to the common shape (mse_loss broadcasts its arguments this way)."""
    tensors: Any = node.args[0]
    common = tuple(torch.broadcast_shapes(*map(shape, tensors)))
    return tuple(t if shape(t) == common else b(aten.expand.default, t, list(common)) for t in tensors)


def _cat(b: Builder, node: fx.Node) -> fx.Node | None:
    """Without the empty tensors of one dim that PyTorch passes over, as those with which a cache begins."""
    parts = [part for part in operands(node) if shape(part) != (0,)]
    if not parts or (len(parts) == len(operands(node)) and node.target is aten.cat.default):
        return None
    parts = [b.cast(part, value(node).dtype) for part in parts]
    return parts[0] if len(parts) == 1 else b(aten.cat.default, parts, argument(node, "dim"))


def _copy(b: Builder, node: fx.Node) -> fx.Node:
    """What is written over a tensor takes its shape and dtype, and nothing of its numbers."""
    source = b.cast(node.args[1], value(node).dtype)  # type: ignore[arg-type]
    return source if shape(source) == shape(node) else b(aten.expand.default, source, list(shape(node)))


def _one_hot(b: Builder, node: fx.Node) -> fx.Node:
    """Whether the index is each class's number."""
    x, count = operands(node)[0], shape(node)[-1]
    classes = b(aten.arange.default, count, dtype=value(x).dtype, device=value(x).device)
    return b(aten._to_copy.default, b(aten.eq.Tensor, b(aten.unsqueeze.default, x, -1), classes), dtype=torch.int64)


def _repeat_interleave(b: Builder, node: fx.Node) -> fx.Node:
    """Each element of a dim several times: a dim of its own, which is merged."""
    x, repeats, dim = operands(node)[0], argument(node, "repeats"), argument(node, "dim")
    if dim is None:
        x, dim = b(aten.reshape.default, x, [-1]), 0
    size, after = list(shape(x)), dim % len(shape(x)) + 1
    several = b(aten.expand.default, b(aten.unsqueeze.default, x, after), [*size[:after], repeats, *size[after:]])
    return b(aten.reshape.default, several, list(shape(node)))


def _squeeze(b: Builder, node: fx.Node) -> fx.Node | None:
    """Only the dims that are of size 1 in the whole, by name: of a split dim a rank may hold one element."""
    x = operands(node)[0]
    size = shape(x)
    asked = argument(node, "dim") if "dim" in argument_names(node) else range(len(size))
    given = [asked] if isinstance(asked, int) else list(asked)
    dims = [d for d in sorted({d % max(len(size), 1) for d in given}) if size[d : d + 1] == (1,)]
    return None if node.target is aten.squeeze.dims and given == dims else b(aten.squeeze.dims, x, dims)


def _type_as(b: Builder, node: fx.Node) -> fx.Node:
    """The first tensor in the dtype of the second."""
    return b.cast(operands(node)[0], value(node).dtype)


def _like(maker: Any) -> Expansion:
    """`zeros_like(x)` needs only the shape of x: it becomes `zeros(shape)`, and nothing depends on x."""

    def expansion(b: Builder, node: fx.Node) -> fx.Node:
        val = value(node)
        fill = [node.args[-1]] if maker is aten.full.default else []
        return b(maker, list(val.shape), *fill, dtype=val.dtype, device=val.device)

    return expansion


def _called(target: Any) -> Expansion:
    """An operator by its other name."""
    return lambda b, node: b(target, *node.args, **node.kwargs)


def _into_complex(b: Builder, node: fx.Node) -> fx.Node | None:
    """A write into a slice of a complex tensor, of which PyTorch has no derivative: into real and imaginary parts."""
    x, source = operands(node)
    if not value(x).is_complex():
        return None
    where = [argument(node, name) for name in argument_names(node)[3:]]
    dim = argument(node, "dim") % len(shape(x))
    parts = [b(aten.view_as_real.default, b.cast(part, value(x).dtype)) for part in (x, source)]
    return b(aten.view_as_complex.default, b(node.target, *parts, dim, *where))


# other names of operators that have rows
_ALIASES = {
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten._conj.default: aten.conj_physical.default,  # at once, as collectives send what is in memory
    aten._neg_view.default: aten.neg.default,
    aten.divide.Scalar: aten.div.Scalar,
    aten.divide.Tensor: aten.div.Tensor,
    aten.multiply.Scalar: aten.mul.Scalar,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.subtract.Scalar: aten.sub.Scalar,
    aten.subtract.Tensor: aten.sub.Tensor,
}

EXPANSIONS: dict[Any, Expansion] = {
    **{name: _called(target) for name, target in _ALIASES.items()},
    **BAGS,
    **dict.fromkeys(chunked_losses, _linear_cross_entropy),
    **FOURIER_EXPANSIONS,
    **LOOKUP_EXPANSIONS,
    **MATRIX_EXPANSIONS,
    **NORMS,
    **POOLS,
    **RECURRENT_EXPANSIONS,
    **REDUCTIONS,
    # the rest, alphabetically
    aten._native_batch_norm_legit.no_stats: _batch_norm_stateless,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_eval,
    aten.binary_cross_entropy.default: _pointwise_loss,
    aten.binary_cross_entropy_with_logits.default: _pointwise_loss,
    aten.broadcast_tensors.default: _broadcast_tensors,
    aten.cat.default: _cat,
    aten.concat.default: _cat,
    aten.concatenate.default: _cat,
    aten.copy.default: _copy,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.fill.Scalar: _like(aten.full.default),
    aten.fill.Tensor: _copy,
    aten.full_like.default: _like(aten.full.default),
    aten.huber_loss.default: _pointwise_loss,
    aten.kl_div.default: _pointwise_loss,
    aten.l1_loss.default: _pointwise_loss,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.mse_loss.default: _pointwise_loss,
    aten.multilabel_margin_loss.default: _pointwise_loss,
    aten.native_dropout.default: _native_dropout,
    aten.new_full.default: _like(aten.full.default),
    aten.new_ones.default: _like(aten.ones.default),
    aten.new_zeros.default: _like(aten.zeros.default),
    aten.nll_loss_nd.default: _nll,
    aten.one_hot.default: _one_hot,
    aten.ones_like.default: _like(aten.ones.default),
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.scaled_dot_product_attention.default: _attention,
    aten.select_scatter.default: _into_complex,
    aten.slice_scatter.default: _into_complex,
    aten.smooth_l1_loss.default: _pointwise_loss,
    aten.soft_margin_loss.default: _pointwise_loss,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.type_as.default: _type_as,
    aten.zero.default: _like(aten.zeros.default),
    aten.zeros_like.default: _like(aten.zeros.default),
}
