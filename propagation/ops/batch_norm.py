"""BatchNorm and its kin as operators that split over batch, space and channels, at the speed of PyTorch's own kernels.

    partway::moments(x, shift)                         per channel the sums of x - shift and of its square, [2, C]
    partway::statistics(moments, shift, count, dtype)  the means and (biased) variances of `count` such elements, [2, C]
    partway::normalise(x, mean, var, weight, bias, eps)
                                                       (x - mean) / sqrt(var + eps) * weight + bias

Dim 1 of x has the channels. Moments are sums to which every part of x has an addend, so one AllReduce of [2, C] gives
the statistics of the whole batch. The backward sends one AllReduce of [2, C], the gradient of the statistics, besides
the gradients of weight and bias. Moments are float64, so that the variance, a difference of two of them, is as exact
for float32 numbers as one computed in two passes; for float64 x, `shift` is its mean, and the moments are central. The
result does not depend on `shift`, which therefore gets no gradient.

The gradient of x has two terms, from `normalise` and from `moments`, with the AllReduce between them; once both are
known, `spread` computes their sum in the time of one (`merge_gradients`).

    partway::sample_moments(x, shift)                  `moments` of each sample, [2, N, C]

GroupNorm, InstanceNorm and LayerNorm of images (`norms.py`) have statistics per sample. The moments of a group are sums
of those of its channels, small vectors, so channels may be split anywhere. `statistics` takes moments of any shape. If
`mean` and `var` are [N, C], they and their gradients are per channel of each sample, while `weight` and `bias` stay
[C]. PyTorch's kernels then treat the channels of all samples as channels of a batch of one, or run sample by sample if
the channels are the last dim in memory. The backward keeps no tensor of the size of x but x, like PyTorch's. All this
is for split images; for others, PyTorch's operator runs. Forward and backward of a GroupNorm of 8 groups in float32
took, in processor time of one thread of a busy machine, 1.5 to 1.8 times as long as PyTorch's on [4, 64, 128, 128], 0.7
to 0.9 times with channels last, and 2.3 and 4.6 times on [64, 256, 8, 8].

    partway::part_norm(x, weight, bias, parts, eps)    BatchNorm of each part of the batch by its own statistics: x is
                                                       [part, sample, channel, ...]; (y, statistics, mean, rstd)

With separate statistics for the parts of a batch (`batch_norm_parts`), a part is on one rank, and only the running
statistics are sent. `statistics` [2, channel] is for them: the mean and the unbiased variance, summed over the parts in
x and divided by the number `parts` of all parts, so that ranks have addends; it gets no gradient. The backward keeps
`mean` and `rstd` [part, channel].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from .constants import constant
from .dtypes import wide
from .registration import define

aten = torch.ops.aten


def _format(x: Tensor) -> torch.memory_format:
    """The memory format of `x`, if PyTorch's kernels take it, or the contiguous one."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    as_it_lies = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if last is not None and as_it_lies else torch.contiguous_format


def _as_kernels_take(x: Tensor, like: Tensor | None = None) -> Tensor:
    """`x` in the memory format of `like` (default: its own), with the strides of a new tensor of that format even along
    dims of size 1, which PyTorch's kernels read and its `contiguous` ignores."""
    wanted = _format(x if like is None else like)
    x = x.contiguous(memory_format=wanted)
    if 1 not in x.shape:
        return x
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta", memory_format=wanted).stride())


def _dense(vector: Tensor | None) -> Tensor | None:
    """A vector as PyTorch's kernels read it: contiguous."""
    return None if vector is None else vector.contiguous()


def _spatial(vector: Tensor, x: Tensor) -> Tensor:
    """`vector`, [C] or [N, C], with its elements along the samples and channels of `x`."""
    samples = vector.shape[0] if vector.dim() == 2 else 1
    return vector.reshape(samples, -1, *[1] * (x.dim() - 2))


def _batches(of: Tensor, vectors: tuple[Tensor | None, ...], *xs: Tensor) -> Iterator[tuple[Any, ...]]:
    """Batches in which each channel has one element of each vector: the parts of the `xs` (of the same strides), then
    those of the `vectors`. With `of` [C] it is the whole batch; with [N, C] a batch of one with the channels of all
    samples, or one sample after the other."""
    if of.dim() == 1:
        yield (*xs, *map(_dense, vectors))
        return
    each = [None if vector is None else vector.expand(of.shape).reshape(-1).contiguous() for vector in vectors]
    samples, channels = of.shape
    if xs[0].is_contiguous():
        yield (*(x.view(1, samples * channels, -1) for x in xs), *each)
        return
    for n in range(samples):
        own = slice(n * channels, (n + 1) * channels)
        yield (*(x[n : n + 1] for x in xs), *(None if vector is None else vector[own] for vector in each))


def _affine(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias in one pass, in the dtype of `x`."""
    x = _as_kernels_take(x)
    if mean.dim() == 1:
        dense = map(_dense, (weight, bias, mean, var))
        result: Tensor = aten.native_batch_norm(x, *dense, False, 0.0, eps)[0]
        return result
    results, unused = torch.empty_like(x), {name: mean.new_empty(0) for name in ("save_mean", "save_invstd")}
    for part, into, *vectors in _batches(mean, (weight, bias, mean, var), x, results):
        aten.native_batch_norm.out(part, *vectors, False, 0.0, eps, out=into, **unused)
    return results


def _sums(y: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """For each channel (of each sample) the sums of y and of y (x - mean) / sqrt(var + eps), in one pass."""
    x = _as_kernels_take(x)
    y = _as_kernels_take(y, x)
    saved = mean.new_empty(0)  # unused in evaluation, but the CUDA kernel requires a tensor
    sums = [
        aten.native_batch_norm_backward(up, part, *vectors, saved, saved, False, eps, [False, True, True])[1:]
        for up, part, *vectors in _batches(mean, (weight, mean, var), y, x)
    ]
    weighed, plain = (torch.cat(parts).view(mean.shape) for parts in zip(*sums, strict=True))
    return plain, weighed


def _factor(weight: Tensor | None, like: Tensor) -> Tensor:
    """`weight` in the dtype of `like`, whose last dim has the channels; ones without a weight."""
    return like.new_ones(like.shape[-1]) if weight is None else weight.to(like.dtype)


def _moments(x: Tensor, shift: Tensor | None) -> Tensor:
    """Moments; without a shift they come from the mean and variance of PyTorch's kernel. It adds elements up one by one
    in float64: for float64 x, many equal ones, such as the padding of a short slice, would be rounded in one direction.
    """
    if shift is not None:
        part, dims = x - shift.view(-1, *[1] * (x.dim() - 2)), [0, *range(2, x.dim())]
        return torch.stack((part.sum(dims), part.square().sum(dims))).double()
    part = x.to(wide(x.dtype), memory_format=_format(x))  # in low precision the kernel would round its results
    away, var = (vector.double() for vector in aten.batch_norm_update_stats(part, None, None, 0.0))
    return torch.stack((away, torch.addcmul(var, away, away))).mul_(x.numel() // max(x.shape[1], 1))


def _sample_moments(x: Tensor, shift: Tensor | None) -> Tensor:
    """Like `_moments`, by PyTorch's GroupNorm kernel with one channel per group, which takes a third of the time."""
    part = _as_kernels_take(x.to(wide(x.dtype)), x)
    samples, channels = part.shape[:2]
    count = math.prod(part.shape[2:])
    if part.is_contiguous():
        _, mean, slope = aten.native_group_norm(part, None, None, samples, channels, count, channels, 0.0)
        mean, var = mean.double(), slope.double().pow_(-2)
    else:
        each = [aten.batch_norm_update_stats(sample, None, None, 0.0) for sample in part.split(1)]
        mean, var = (torch.stack(vectors).double() for vectors in zip(*each, strict=True))
    away = mean if shift is None else mean - shift
    return torch.stack((away, torch.addcmul(var, away, away))).mul_(count)


def _moments_backward(slopes: Tensor, x: Tensor, shift: Tensor | None) -> Tensor:
    """s + 2 q (x - shift) for slopes (s, q)."""
    first, second = slopes[0], 2 * slopes[1]
    if shift is not None:
        first = first - second * shift
    weight, bias = second.to(wide(x.dtype)), first.to(wide(x.dtype))
    return _affine(x, torch.zeros_like(weight), torch.ones_like(weight), weight, bias, 0.0)


def _statistics(moments: Tensor, shift: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    mean, square = (moments / count).unbind()
    var = torch.addcmul(square, mean, mean, value=-1).clamp_(min=0)
    return torch.stack((mean if shift is None else mean + shift, var)).to(dtype)


def _statistics_backward(slopes: Tensor, moments: Tensor, count: int) -> Tensor:
    """The gradient of s / count and q / count - (s / count)^2 with respect to (s, q); a shift adds nothing."""
    mean, var = (slopes.double() / count).unbind()
    return torch.stack((mean - 2 / count * moments[0] * var, var))


def _normalise(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    dtype = wide(x.dtype)
    mean, var = mean.to(dtype), var.to(dtype)
    return _affine(x, mean, var, _factor(weight, mean), None if bias is None else bias.to(dtype), eps)


def _scale(y: Tensor, var: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """y / sqrt(var + eps) * weight."""
    var = var.to(wide(y.dtype))
    return _affine(y, torch.zeros_like(var), var, _factor(weight, var), None, eps)


def _vector_gradients(
    y: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of mean, variance, weight and bias from the gradient y of the result."""
    dtype = wide(x.dtype)
    mean, var = mean.to(dtype), var.to(dtype)
    factor = _factor(weight, mean)
    plain, weighed = _sums(y, x, mean, var, factor, eps)
    slope = (var + eps).rsqrt_()
    factor = factor * slope
    of_mean, of_var = -factor * plain, -0.5 * factor * slope * weighed
    if mean.dim() == 2:
        weighed, plain = weighed.sum(0), plain.sum(0)
    return of_mean, of_var, weighed, plain


def _spread(
    y: Tensor, var: Tensor, weight: Tensor | None, eps: float, slopes: Tensor, x: Tensor, shift: Tensor | None
) -> Tensor:
    gradient = _moments_backward(slopes, x, shift)
    if var.dtype != y.dtype:  # the rounding error of a low-precision factor would affect its whole channel
        return gradient.add_(_scale(y, var, weight, eps))
    return gradient.addcmul_(y, _spatial((var + eps).rsqrt_().mul_(_factor(weight, var)), x))


def _part_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, parts: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = x.new_empty(x.shape[2], dtype=wide(x.dtype))
    factor, addend = _dense(_factor(weight, like)), None if bias is None else _dense(bias.to(like.dtype))
    each: list[tuple[Tensor, ...]] = []
    for part in x.unbind():
        part = _as_kernels_take(part)
        moved = like.new_zeros(2, *like.shape)  # with momentum 1, the running statistics become those of the part
        y, mean, slope = aten.native_batch_norm(part, factor, addend, *moved.unbind(), True, 1.0, eps)
        each.append((y, moved, mean, slope))
    results, statistics, means, slopes = zip(*each, strict=True)
    return _stacked(results), functools.reduce(torch.add, statistics).div_(parts), _stacked(means), _stacked(slopes)


def _part_norm_backward(
    y: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias from the gradient y of the result; weight and bias sum over the parts."""
    factor = _dense(_factor(weight, rstd))
    each: list[tuple[Tensor, ...]] = []
    for slopes, part, *kept in zip(y.unbind(), x.unbind(), mean.unbind(), rstd.unbind(), strict=True):
        part = _as_kernels_take(part)
        slopes = _as_kernels_take(slopes, part)
        kept = [vector.contiguous() for vector in kept]
        each.append(
            aten.native_batch_norm_backward(slopes, part, factor, None, None, *kept, True, eps, [True, True, True])
        )
    results, weighed, plain = zip(*each, strict=True)
    return _stacked(results), functools.reduce(torch.add, weighed), functools.reduce(torch.add, plain)


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    """`parts` along a new first dim, each in its memory format; a single one is not copied."""
    if len(parts) == 1:
        return parts[0].unsqueeze(0)
    whole: Tensor = torch.cat(parts)
    return whole.view(len(parts), -1, *whole.shape[1:])


def _moments_written(x: Tensor, shift: Tensor | None) -> Tensor:
    return _sums_from(x, shift, [0, *range(2, x.dim())])


def _sample_moments_written(x: Tensor, shift: Tensor | None) -> Tensor:
    return _sums_from(x, shift, [*range(2, x.dim())])


def _sums_from(x: Tensor, shift: Tensor | None, dims: list[int]) -> Tensor:
    """The sums of x - shift and of its square over `dims`."""
    away = x.double() if shift is None else x.double() - _spatial(constant(shift.double()), x)
    if not dims:  # each sum has one element
        return torch.stack((away, away.square()))
    return torch.stack((away.sum(dims), away.square().sum(dims)))


def _statistics_written(moments: Tensor, shift: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    """Without the clamp of the variance, so that it also has a gradient there."""
    mean, square = (moments / count).unbind()
    var = square - mean * mean
    return torch.stack((mean if shift is None else mean + constant(shift), var)).to(dtype)


def _normalise_written(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    dtype = wide(x.dtype)
    mean, var = mean.to(dtype), var.to(dtype)
    result = (x.to(dtype) - _spatial(mean, x)) * _spatial((var + eps).rsqrt() * _factor(weight, var), x)
    return (result if bias is None else result + _spatial(bias.to(dtype), x)).to(x.dtype)


def _part_norm_written(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, parts: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers, dims = x.to(wide(x.dtype)), [1, *range(3, x.dim())]
    mean = numbers.mean(dims, keepdim=True)
    away = numbers - mean
    square = away.square().mean(dims, keepdim=True)
    rstd = (square + eps).rsqrt()
    result = away * rstd * _spatial(_factor(weight, numbers[0].flatten(2).transpose(1, 2)), x[0])
    if bias is not None:
        result = result + _spatial(bias.to(numbers.dtype), x[0])
    count = math.prod(x.shape[dim] for dim in dims)
    running = torch.stack((mean, square * (count / max(count - 1, 1)))).sum(1).div(parts).flatten(1)
    kept = (constant(vector.flatten(1)) for vector in (mean, rstd))
    return result.to(x.dtype), constant(running), *kept


def _fake_moments(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float64)


def _fake_sample_moments(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((2, *x.shape[:2]), dtype=torch.float64)


def _fake_statistics(moments: Tensor, shift: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    return moments.new_empty(moments.shape, dtype=dtype)


def _fake_statistics_backward(slopes: Tensor, moments: Tensor, count: int) -> Tensor:
    return moments.new_empty(moments.shape)


def _fake_vector_gradients(y: Tensor, x: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = (mean.shape, mean.shape, mean.shape[-1:], mean.shape[-1:])
    one, two, three, four = (mean.new_empty(shape, dtype=wide(x.dtype)) for shape in shapes)
    return one, two, three, four


def _fake_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=_format(x))


def _fake_parts(x: Tensor) -> Tensor:
    """Memory for a result like `x`, each part in the format of PyTorch's kernels."""
    parts, samples, *rest = x.shape
    empty = torch.empty((parts * samples, *rest), dtype=x.dtype, device=x.device, memory_format=_format(x[0]))
    return empty.view(x.shape)


def _fake_part_norm(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistics, mean, rstd = (
        x.new_empty((first, x.shape[2]), dtype=wide(x.dtype)) for first in (2, x.shape[0], x.shape[0])
    )
    return _fake_parts(x), statistics, mean, rstd


def _fake_part_norm_backward(y: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    one, two = (x.new_empty(x.shape[2], dtype=wide(x.dtype)) for _ in range(2))
    return _fake_parts(x), one, two


def _keep_for_moments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back_from_moments(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
    return moments_backward(slopes, *ctx.saved_tensors), None


def _keep_for_statistics(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    total, _, ctx.count, _ = inputs
    ctx.save_for_backward(total)


def _back_from_statistics(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
    return statistics_backward(slopes, *ctx.saved_tensors, ctx.count), None, None, None


def _keep_for_normalise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, var, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, mean, var, weight)
    ctx.dtypes = tuple(None if vector is None else vector.dtype for vector in (mean, var, weight, bias))


def _back_from_normalise(ctx: Any, y: Tensor) -> tuple[Tensor | None, ...]:
    x, mean, var, weight = ctx.saved_tensors
    of_x = scale(y, var, weight, ctx.eps) if ctx.needs_input_grad[0] else None
    if not any(ctx.needs_input_grad[1:5]):
        return of_x, None, None, None, None, None
    gradients = vector_gradients(y, x, mean, var, weight, ctx.eps)
    of_vectors = (None if d is None else vector.to(d) for vector, d in zip(gradients, ctx.dtypes, strict=True))
    return of_x, *of_vectors, None


def _keep_for_part_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.eps = inputs
    _, statistics, mean, rstd = output
    ctx.mark_non_differentiable(statistics, mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.dtypes = tuple(None if vector is None else vector.dtype for vector in (weight, bias))


def _back_from_part_norm(ctx: Any, y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_x, *of_vectors = part_norm_backward(y, *ctx.saved_tensors, ctx.eps)
    vectors = (None if d is None else vector.to(d) for vector, d in zip(of_vectors, ctx.dtypes, strict=True))
    return of_x, *vectors, None, None


# -- The operators

moments = define(
    "moments(Tensor x, Tensor? shift) -> Tensor",
    _moments,
    _fake_moments,
    backward=_back_from_moments,
    keep=_keep_for_moments,
    written=_moments_written,
)
sample_moments = define(
    "sample_moments(Tensor x, Tensor? shift) -> Tensor",
    _sample_moments,
    _fake_sample_moments,
    backward=_back_from_moments,
    keep=_keep_for_moments,
    written=_sample_moments_written,
)
moments_backward = define(
    "moments_backward(Tensor slopes, Tensor x, Tensor? shift) -> Tensor",
    _moments_backward,
    lambda slopes, x, shift: _fake_like(x),
    fresh=True,
)
statistics = define(
    "statistics(Tensor moments, Tensor? shift, int count, ScalarType dtype) -> Tensor",
    _statistics,
    _fake_statistics,
    backward=_back_from_statistics,
    keep=_keep_for_statistics,
    written=_statistics_written,
)
statistics_backward = define(
    "statistics_backward(Tensor slopes, Tensor moments, int count) -> Tensor",
    _statistics_backward,
    _fake_statistics_backward,
)
normalise = define(
    "normalise(Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    _normalise,
    _fake_like,
    backward=_back_from_normalise,
    keep=_keep_for_normalise,
    written=_normalise_written,
    fresh=True,
)
scale = define("scale(Tensor y, Tensor var, Tensor? weight, float eps) -> Tensor", _scale, _fake_like, fresh=True)
vector_gradients = define(
    "vector_gradients(Tensor y, Tensor x, Tensor mean, Tensor var, Tensor? weight, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _vector_gradients,
    _fake_vector_gradients,
)
spread = define(
    "spread(Tensor y, Tensor var, Tensor? weight, float eps, Tensor slopes, Tensor x, Tensor? shift) -> Tensor",
    _spread,
    lambda y, var, weight, eps, slopes, x, shift: _fake_like(x),
    fresh=True,
)
part_norm = define(
    "part_norm(Tensor x, Tensor? weight, Tensor? bias, int parts, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _part_norm,
    _fake_part_norm,
    backward=_back_from_part_norm,
    keep=_keep_for_part_norm,
    written=_part_norm_written,
    fresh=True,
)
part_norm_backward = define(
    "part_norm_backward(Tensor y, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    _part_norm_backward,
    _fake_part_norm_backward,
    fresh=True,
)


def merge_gradients(graph: fx.Graph) -> None:
    """Replace each sum of the two terms of a gradient of x, if nothing else reads them, by `spread` (in place)."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        terms = {term.target: term for term in node.all_input_nodes if len(term.users) == 1}
        if set(terms) != {scale, moments_backward} or len(node.args) != 2:
            continue
        with graph.inserting_before(node):
            merged = graph.call_function(spread, (*terms[scale].args, *terms[moments_backward].args))
        merged.meta = dict(node.meta)
        node.replace_all_uses_with(merged)
        for gone in (node, *terms.values()):
            graph.erase_node(gone)
