"""BatchNorm, and the operators in terms of which norms are written (`ops/batch_norm.py`).

In training the statistics of a batch follow from its moments, sums to which every part of the batch has an addend; with
`batch_norm_parts`, each part has its own. `normalise` applies the statistics to each element.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ....strategy.errors import StrategyError
from ...graph.nodes import at_source, module_path, operands, shape, value
from ...ops.batch_norm import moments, normalise, part_norm, sample_moments, statistics
from ...ops.dtypes import wide
from ..builder import Builder, Expansion
from ..dims import letters_of, sizes_of, split_evenly, without
from ..row import Row, RowFunction
from ..rule import Emitter, Rule

aten = torch.ops.aten

# -- Rules


def _moments_rule(node: fx.Node) -> Rule | None:
    """Sums over all dims but the channels (dim 1): every part of x has an addend."""
    size = shape(operands(node)[0])
    letters = letters_of(size)
    shift = tuple((letters[1],) for _ in operands(node)[1:])
    summed = frozenset(f for parts in (letters[0], *letters[2:]) for f in parts)
    return Rule(
        (letters, *shift), (((), letters[1]),), sizes_of(letters, size), reduce=summed, local=_local_moments, masks=True
    )


def _local_moments(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Fill the padding of an uneven shard of x with the shift, or zero, so that it adds nothing."""
    x, shift = args
    for mask in emit.padding_masks(0, x):
        if shift is None:
            x = emit.call(aten.masked_fill.Scalar, x, mask, 0.0)
        else:
            size = emit.shapes.operands[1]
            around = [1] * (len(emit.shapes.operands[0]) - 2)
            spread = emit.call(aten.reshape.default, shift, [*([1] if len(size) == 1 else []), *size, *around])
            x = emit.call(aten.where.self, mask, spread, x)
    return emit.call(emit.node.target, x, shift)


def _sample_moments_rule(node: fx.Node) -> Rule | None:
    """Sums over all dims but the samples (dim 0) and channels (dim 1)."""
    size = shape(operands(node)[0])
    letters = letters_of(size)
    shift = tuple(letters[:2] for _ in operands(node)[1:])
    summed = frozenset(f for parts in letters[2:] for f in parts)
    return Rule(
        (letters, *shift),
        (((), *letters[:2]),),
        sizes_of(letters, size),
        reduce=summed,
        even=frozenset(letters[1]),
        local=_local_moments,
        masks=True,
    )


def _statistics_rule(node: fx.Node) -> Rule | None:
    """Channels (of each sample) are independent."""
    letters = without(letters_of(shape(node)), {0})
    return Rule((letters, *(letters[1:] for _ in operands(node)[1:])), (letters,), sizes_of(letters, shape(node)))


def _normalise_rule(node: fx.Node) -> Rule | None:
    """Elementwise, with the vectors of its channel (dim 1), of all samples or of each; jointly linear in x, the mean
    and the bias."""
    size = shape(node)
    letters = letters_of(size)
    vectors = (letters[1:2] if len(shape(o)) == 1 else letters[:2] for o in operands(node)[1:])
    bias = frozenset(() if node.args[4] is None else (len(operands(node)) - 1,))
    linear = (bias | {0, 1},)
    even = frozenset(letters[1]) if len(shape(operands(node)[1])) == 2 else frozenset[str]()  # groups are whole
    sizes = sizes_of(letters, size)
    return Rule(
        (letters, *vectors),
        (letters,),
        sizes,
        additive=bias,
        linear=linear,
        local=_local_normalise,
        even=even | split_evenly(node, sizes),
    )


def _local_normalise(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Call PyTorch's GroupNorm, which computes the moments itself, where a rank has all of each group."""
    x, mean, var, weight, bias, eps = args
    groups = whole_groups(x, mean, var, emit.shapes.operands[0][1])
    dtypes = {value(o).dtype for o in operands(emit.node)[3:]} - {value(emit.node).dtype}
    if groups is None or dtypes - {wide(value(emit.node).dtype)}:
        return emit.call(normalise, *args, **kwargs)
    return emit.call(aten.group_norm.default, x, groups, weight, bias, eps, False)


def _part_norm_rule(node: fx.Node) -> Rule | None:
    """Parts of the batch (dim 0) and channels (dim 2) are independent; the statistics are sums over the parts."""
    size = shape(operands(node)[0])
    letters = without(letters_of(size), {1, *range(3, len(size))})
    part, _, channel, *_ = letters
    vectors, kept = ((channel,) for _ in operands(node)[1:]), (part, channel)
    results = (letters, ((), channel), kept, kept)
    even = frozenset((*part, *channel))
    return Rule(
        (letters, *vectors), results, sizes_of(letters, size), reduce=frozenset(part), even=even, local=_local_part_norm
    )


def _local_part_norm(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | tuple[fx.Node, ...]:
    """Call PyTorch's BatchNorm where a rank has one part: one operator in place of some twenty small ones. Running
    statistics of zero, updated with the momentum 1 / parts, become the addends of the part."""
    x, weight, bias, parts, eps = args
    (first, *size), tensors = emit.shapes.operands[0], [value(o) for o in operands(emit.node)]
    dtype, device = tensors[0].dtype, tensors[0].device
    if first > 1 or dtype != wide(dtype) or any(t.dtype != dtype or not t.is_contiguous() for t in tensors[1:]):
        return emit.call(part_norm, *args, **kwargs)
    zeros, kind = aten.zeros.default, {"dtype": dtype, "device": device}
    known = emit.graph.find_nodes(op="call_function", target=zeros)
    zero = next((n for n in known if (n.args, n.kwargs) == (([size[1]],), kind)), None)
    zero = zero or emit.call(zeros, [size[1]], **kind)
    normed = emit.call(
        aten._native_batch_norm_legit_functional.default, emit.call(aten.reshape.default, x, size),
        weight, bias, zero, zero, True, 1 / parts, eps,
    )  # fmt: skip
    y, mean, rstd, *shares = (emit.call(operator.getitem, normed, i) for i in range(5))
    y, mean, rstd = (emit.call(aten.unsqueeze.default, each, 0) for each in (y, mean, rstd))
    return y, emit.call(aten.stack.default, shares), mean, rstd


# The operators between the moments of channels and the statistics of their group.
_BETWEEN = frozenset({
    aten.expand.default, aten.reshape.default, aten.sum.dim_IntList, aten.unbind.int, aten.unsqueeze.default, statistics
})  # fmt: skip


def whole_groups(x: fx.Node, mean: fx.Node, var: fx.Node, channels: int) -> int | None:
    """The number of groups of channels in the local `normalise` of `x`, or None if the statistics are not those of the
    same part of x: other ranks also have a part of each group, or it is another norm."""
    groups, pair = channels, (mean, var)
    if any(node.target is not operator.getitem for node in pair) or mean.args[0] is not var.args[0]:
        return None
    node: Any = mean.args[0]
    while node.target in _BETWEEN:
        if node.target is aten.reshape.default and len(node.args[1]) == 4:
            groups = node.args[1][2]
        node = node.args[0]
    return groups if node.target is sample_moments and node.args[0] is x else None


# -- Expansions


def _expand_batch_norm(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    """aten._native_batch_norm_legit_functional: (y, saved mean, saved rstd, new mean, new var)."""
    x, weight, bias, old_mean, old_var, training, momentum, eps = node.args[:8]
    return _batch_norm_of(b, node, (x, weight, bias, old_mean, old_var), training, momentum, eps)


def _expand_batch_norm_eval(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    """aten._native_batch_norm_legit_no_training: with the running statistics."""
    x, weight, bias, mean, var, momentum, eps = node.args[:7]
    return _batch_norm_of(b, node, (x, weight, bias, mean, var), False, momentum, eps)


def _expand_batch_norm_stateless(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...]:
    """aten._native_batch_norm_legit.no_stats: without running statistics."""
    x, weight, bias, training, momentum, eps = node.args[:6]
    return _batch_norm_of(b, node, (x, weight, bias, None, None), training, momentum, eps)


def _batch_norm_of(
    b: Builder, node: fx.Node, tensors: tuple[Any, ...], training: Any, momentum: Any, eps: Any
) -> tuple[fx.Node | None, ...]:
    """BatchNorm in terms of `moments`, `statistics` and `normalise`: in training with the statistics of the whole
    batch, or of each part. `tensors`: x, weight, bias, running mean and variance."""
    x, weight, bias, old_mean, old_var = tensors
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
        both = b(aten.unbind.int, b(statistics, b(moments, x, shift), shift, count, dtype))
        mean, var = b(operator.getitem, both, 0), b(operator.getitem, both, 1)
        if old_mean is not None:
            unbiased = b(aten.mul.Scalar, b(aten.detach.default, var), count / max(count - 1, 1))
            new_mean = _blend(b, old_mean, b(aten.detach.default, mean), momentum)
            new_var = _blend(b, old_var, unbiased, momentum)
    y = b(normalise, x, mean, var, weight, bias, eps)
    saved = value(node)[1]
    if not training and saved.shape == (0,):
        empty = b(aten.zeros.default, [0], dtype=saved.dtype, device=saved.device)
        return (y, empty, empty, new_mean, new_var)
    mean, var = (b(aten.detach.default, s) for s in (mean, var))  # the saved ones get no gradient
    rstd = b(aten.rsqrt.default, b(aten.add.Scalar, var, eps))
    return (y, mean, rstd, new_mean, new_var)


def _part_norm_of(
    b: Builder, x: Any, weight: Any, bias: Any, old_mean: Any, old_var: Any, momentum: Any, eps: Any
) -> tuple[fx.Node | None, ...]:
    """BatchNorm of each part of the batch by its own statistics; running statistics take the mean over the parts."""
    parts, (batch, *rest) = b.batch_norm_parts, shape(x)
    split = b(aten.reshape.default, x, [parts, batch // parts, *rest])
    normed = b(part_norm, split, weight, bias, parts, eps)
    y = b(aten.reshape.default, b(operator.getitem, normed, 0), [batch, *rest])
    both = b(aten.unbind.int, b(aten.detach.default, b(operator.getitem, normed, 1)))
    mean, var = b(operator.getitem, both, 0), b(operator.getitem, both, 1)
    new_mean, new_var = None, None
    if old_mean is not None:
        new_mean, new_var = _blend(b, old_mean, mean, momentum), _blend(b, old_var, var, momentum)
    each = b(aten.detach.default, b(operator.getitem, normed, 3))
    rstd = b(aten.div.Scalar, b(aten.sum.dim_IntList, each, [0]), parts)
    return (y, mean, rstd, new_mean, new_var)


def _is_synchronised(node: fx.Node) -> bool:
    """Whether `node` belongs to a SyncBatchNorm, which needs the statistics of the whole batch."""
    kinds = (kind for _, kind in (node.meta.get("nn_module_stack") or {}).values())
    return any(str(kind).endswith(".SyncBatchNorm") for kind in kinds)


def _check_parts(node: fx.Node, parts: int) -> None:
    """Raise StrategyError unless the batch divides into `parts` parts, each with a variance."""
    size = shape(operands(node)[0])
    part = [size[0] / parts, *size[2:]]
    if size[0] % parts:
        what = "does not divide that batch; give a multiple of it (the last batch of an epoch: DataLoader's drop_last)"
    elif math.prod(part) == 1:
        what = "leaves one value per channel and part, which has no variance; give a larger batch"
    else:
        return
    raise StrategyError(
        f"the BatchNorm in {module_path(node) or 'the function'} gets a batch of {size[0]} (its input is "
        f"{list(size)}), and batch_norm_parts={parts} {what}, or "
        f"set batch_norm_parts to {_parts_of(size)}{at_source(node)}"
    )


def _parts_of(size: tuple[int, ...]) -> str:
    """The possible numbers of parts of a batch, each with a variance, as text."""
    counts = [str(n) for n in range(1, size[0] + 1) if size[0] % n == 0 and math.prod(size) != n * size[1]]
    return " or ".join([", ".join(counts[:-1]), counts[-1]] if counts[1:] else counts)


def _blend(b: Builder, old: Any, new: Any, momentum: Any) -> fx.Node:
    """The running statistic `old` moved towards `new`, in its own dtype."""
    return b(aten.lerp.Scalar, old, b.cast(new, value(old).dtype), momentum)


ROWS: dict[Any, Row | RowFunction] = {
    moments: _moments_rule,
    normalise: _normalise_rule,
    part_norm: _part_norm_rule,
    sample_moments: _sample_moments_rule,
    statistics: _statistics_rule,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten._native_batch_norm_legit.no_stats: _expand_batch_norm_stateless,
    aten._native_batch_norm_legit_functional.default: _expand_batch_norm,
    aten._native_batch_norm_legit_no_training.default: _expand_batch_norm_eval,
}
