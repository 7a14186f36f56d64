"""Norms with statistics of each sample: GroupNorm, InstanceNorm, and LayerNorm and RMSNorm of several dims.

Their statistics are sums, so they split over batch, image and channels: `sample_moments` computes the sums of each
channel, those of a group are sums of these small vectors, and `normalise` applies the statistics to the channels
(`batch_norm.py`). A LayerNorm of images is a GroupNorm with one group, or with a group for each channel if it does not
normalise over channels. Where a rank has all of each group, PyTorch's own operator runs instead (`whole_groups` in
`batch_norm.py`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ...graph.nodes import argument, argument_names, operands, results_of, shape, value
from ...ops.batch_norm import normalise, sample_moments, statistics
from ...ops.dtypes import wide
from ..builder import Builder, Expansion
from ..dims import letters_of, sizes_of, split_evenly, without
from ..local_forms import replaced
from ..row import Row, RowFunction
from ..rule import Emitter, Rule

aten = torch.ops.aten

# -- Rules


def _layer_norm_rule(node: fx.Node) -> Rule | None:
    """layer_norm and rms_norm: the normalised dims stay whole."""
    x = operands(node)[0]
    size, count = shape(x), len(argument(node, "normalized_shape"))
    letters = without(letters_of(size), range(len(size) - count, len(size)))
    affine = tuple(((),) * count for _ in operands(node)[1:])
    sizes = sizes_of(letters, size)
    return Rule((letters, *affine), (letters,), sizes, even=split_evenly(node, sizes))


def _group_norm_rule(node: fx.Node) -> Rule | None:
    """Samples are independent, in the calls that expansion leaves."""
    x = operands(node)[0]
    letters = without(letters_of(shape(x)), range(1, len(shape(x))))
    sizes = sizes_of(letters, shape(x))
    return Rule((letters, *(((),) for _ in operands(node)[1:])), (letters,), sizes, even=split_evenly(node, sizes))


def _native_norm_rule(node: fx.Node) -> Rule:
    """native_layer_norm and native_group_norm: the dims before the normalised ones are independent."""
    x, *vectors = operands(node)
    size = shape(x)
    layer = "normalized_shape" in argument_names(node)
    first = len(size) - len(argument(node, "normalized_shape")) if layer else 1
    letters = without(letters_of(size), range(first, len(size)))
    affine = tuple(((),) * len(shape(o)) for o in vectors)
    statistics = tuple((*letters[:first], *((),) * (len(t.shape) - first)) for t in results_of(node)[1:])
    local = None if layer else _local_group_norm
    sizes = sizes_of(letters, size)
    return Rule((letters, *affine), (letters, *statistics), sizes, local=local, even=split_evenly(node, sizes))


def _local_group_norm(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Pass the local number of samples to native_group_norm."""
    args, kwargs = replaced(emit.node, args, kwargs, N=emit.shapes.operands[0][0])
    return emit.call(emit.node.target, *args, **kwargs)


# -- Expansions


def _group_statistics(b: Builder, x: fx.Node, groups: int) -> fx.Node:
    """[2, N, groups]: the means and (biased) variances of each group of each sample."""
    channels, dtype = shape(x)[1], wide(value(x).dtype)
    count = channels // groups * math.prod(shape(x)[2:])
    shift = about = None
    if dtype == torch.float64:
        total = b(aten.sum.dim_IntList, b(aten.detach.default, x), list(range(2, len(shape(x)))))
        shift = b(aten.div.Scalar, _by_group(b, total, groups), count)
        about = _by_channel(b, shift, channels)
    return b(statistics, _by_group(b, b(sample_moments, x, about), groups), shift, count, dtype)


def _by_group(b: Builder, vector: fx.Node, groups: int) -> fx.Node:
    """[..., channels] -> [..., groups], summed over the channels of a group."""
    *lead, channels = shape(vector)
    if groups == channels:
        return vector
    split = b(aten.reshape.default, vector, [*lead, groups, channels // groups])
    return b(aten.sum.dim_IntList, split, [len(lead) + 1])


def _by_channel(b: Builder, vector: fx.Node, channels: int) -> fx.Node:
    """[..., groups] -> [..., channels], repeated for the channels of a group."""
    *lead, groups = shape(vector)
    if groups == channels:
        return vector
    each = b(aten.unsqueeze.default, vector, len(lead) + 1)
    return b(aten.reshape.default, b(aten.expand.default, each, [*lead, groups, channels // groups]), [*lead, channels])


def _normalised(b: Builder, x: fx.Node, stats: fx.Node, weight: Any, bias: Any, eps: float) -> fx.Node:
    """`x` normalised by the statistics [2, N, groups] of its groups."""
    both = b(aten.unbind.int, _by_channel(b, stats, shape(x)[1]))
    return b(normalise, x, b(operator.getitem, both, 0), b(operator.getitem, both, 1), weight, bias, eps)


def _splits(x: fx.Node) -> bool:
    """Whether there are dims to split besides batch and channels."""
    return math.prod(shape(x)[2:]) > 1 and math.prod(shape(x)) > 0


def _expand_group_norm(b: Builder, node: fx.Node) -> fx.Node | None:
    x = operands(node)[0]
    if not _splits(x):
        return None
    stats = _group_statistics(b, x, argument(node, "num_groups"))
    return _normalised(b, x, stats, argument(node, "weight"), argument(node, "bias"), argument(node, "eps"))


def _expand_native_group_norm(b: Builder, node: fx.Node) -> tuple[fx.Node | None, ...] | None:
    """(y, mean, rstd)."""
    x, eps = operands(node)[0], argument(node, "eps")
    if not _splits(x):
        return None
    stats = _group_statistics(b, x, argument(node, "group"))
    y = _normalised(b, x, stats, argument(node, "weight"), argument(node, "bias"), eps)
    both = b(aten.unbind.int, stats)
    mean, var = b(operator.getitem, both, 0), b(operator.getitem, both, 1)
    rstd = b(aten.rsqrt.default, b(aten.add.Scalar, var, eps))
    return (y, *(b.cast(kept, value(node)[1].dtype) for kept in (mean, rstd)))


def _expand_instance_norm(b: Builder, node: fx.Node) -> fx.Node | None:
    """InstanceNorm with the statistics of each sample's channels, or with the running ones in evaluation. The running
    statistics, whose update torch.export does not see, move towards the means over the samples of their means and
    unbiased variances."""
    x, eps = operands(node)[0], argument(node, "eps")
    weight, bias = argument(node, "weight"), argument(node, "bias")
    old_mean, old_var = argument(node, "running_mean"), argument(node, "running_var")
    if not argument(node, "use_input_stats"):
        return b(normalise, x, old_mean, old_var, weight, bias, eps)
    samples, channels, *space = shape(x)
    stats, count = _group_statistics(b, x, channels), math.prod(space)
    if old_mean is not None and argument(node, "momentum"):
        both = b(aten.unbind.int, b(aten.detach.default, stats))
        unbiased = b(aten.mul.Scalar, b(operator.getitem, both, 1), count / max(count - 1, 1))
        for old, each in ((old_mean, b(operator.getitem, both, 0)), (old_var, unbiased)):
            mean = b(aten.div.Scalar, b(aten.sum.dim_IntList, each, [0]), samples)
            b.write(old, b(aten.lerp.Scalar, old, b.cast(mean, value(old).dtype), argument(node, "momentum")))
    return _normalised(b, x, stats, weight, bias, eps)


def _expand_layer_norm(b: Builder, node: fx.Node) -> fx.Node | None:
    """A LayerNorm over several dims is a GroupNorm with a weight and bias for each element. Over the last dim alone, as
    in transformers, PyTorch's operator runs: it is faster, and that dim is rarely split."""
    x, dims = operands(node)[0], len(argument(node, "normalized_shape"))
    if dims == 1 or math.prod(shape(x)) == 0:
        return None
    outer, inner = shape(x)[:-dims], shape(x)[-dims:]
    lead = outer if len(outer) in (1, 2) else (math.prod(outer[:-1]), *outer[-1:]) if outer else (1,)
    y = _as(b, b.cast(x, wide(value(x).dtype)), (*lead, *inner))
    y = _normalised(b, y, _group_statistics(b, y, lead[1] if len(lead) > 1 else 1), None, None, argument(node, "eps"))
    y = _as(b, y, shape(x))
    if argument(node, "weight") is not None:
        y = b(aten.mul.Tensor, y, argument(node, "weight"))
    if argument(node, "bias") is not None:
        y = b(aten.add.Tensor, y, argument(node, "bias"))
    return b.cast(y, value(node).dtype)


def _expand_rms_norm(b: Builder, node: fx.Node) -> fx.Node | None:
    """x / sqrt(mean of squares + eps) * weight over several dims; over the last dim alone PyTorch's operator runs."""
    x, weight, eps = operands(node)[0], argument(node, "weight"), argument(node, "eps")
    dims = len(argument(node, "normalized_shape"))
    if dims == 1:
        return None
    y = b.cast(x, wide(value(x).dtype))
    total = b(aten.sum.dim_IntList, b(aten.mul.Tensor, y, y), list(range(len(shape(x)) - dims, len(shape(x)))), True)
    mean = b(aten.div.Scalar, total, math.prod(shape(x)[-dims:]))
    eps = torch.finfo(value(x).dtype).eps if eps is None else eps
    y = b(aten.mul.Tensor, y, b(aten.rsqrt.default, b(aten.add.Scalar, mean, eps)))
    return b.cast(y if weight is None else b(aten.mul.Tensor, y, weight), value(node).dtype)


def _as(b: Builder, x: fx.Node, size: tuple[int, ...]) -> fx.Node:
    """`x` as a tensor of `size`."""
    return x if shape(x) == size else b(aten.reshape.default, x, list(size))


ROWS: dict[Any, Row | RowFunction] = {
    aten.group_norm.default: _group_norm_rule,
    aten.layer_norm.default: _layer_norm_rule,
    aten.native_group_norm.default: _native_norm_rule,
    aten.native_layer_norm.default: _native_norm_rule,
    aten.rms_norm.default: _layer_norm_rule,
}

EXPANSIONS: dict[Any, Expansion] = {
    aten.group_norm.default: _expand_group_norm,
    aten.instance_norm.default: _expand_instance_norm,
    aten.layer_norm.default: _expand_layer_norm,
    aten.native_group_norm.default: _expand_native_group_norm,
    aten.rms_norm.default: _expand_rms_norm,
}
