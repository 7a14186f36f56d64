"""Cross entropy of logits whose classes may be split.

    partway::class_terms(x, maximum, target, position, bounds, ignored)
                                              the two sums over classes in cross entropy, over a rank's own classes,
                                              which begin at bounds[position] (no position: over all)

With a maximum m over all classes, `cross_entropy = log(sum of exp(x - m)) - (x - m)[target]`. Both terms are sums to
which every part of the classes has an addend, so logits with split classes are never gathered. One operator computes
both, a few rows at a time: the only tensor of the size of the logits that it keeps are the logits, and the only one
that its backward allocates is their gradient. It computes in float32 for logits of lower precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .dtypes import wide
from .indexing import out_of_range, span_of, within
from .registration import define

aten = torch.ops.aten

# Logits per block: as many as fit a processor's cache; on other devices few launches, and 256 MB of float32.
_AT_ONCE = {"cpu": 2**18}
_AT_ONCE_ELSEWHERE = 2**26


def _rows(x: Tensor) -> Iterator[slice]:
    """Slices along dim 0 of `x` with a bounded number of elements."""
    elements = _AT_ONCE.get(x.device.type, _AT_ONCE_ELSEWHERE)
    count = max(1, elements // max(1, x[:1].numel()))
    return (slice(start, start + count) for start in range(0, len(x), count))


def _class_terms(
    x: Tensor, maximum: Tensor, target: Tensor, position: Tensor | None, bounds: list[int], ignored: int
) -> tuple[Tensor, Tensor]:
    start, stop = span_of(position, bounds)
    own = within(target, start, stop, bounds[-1], ignored)
    x = x.narrow(1, 0, stop - start)
    total = torch.zeros_like(maximum, dtype=wide(x.dtype), memory_format=torch.contiguous_format)
    if start == stop:
        return total, torch.zeros_like(total)
    for rows in _rows(x):
        total[rows] = (x[rows].to(total.dtype) - maximum[rows].unsqueeze(1)).exp_().sum(1)
    picked = x.gather(1, own.clamp(min=0).unsqueeze(1)).squeeze(1)
    return total, (picked.to(total.dtype) - maximum).masked_fill_(own < 0, 0)


def _class_terms_backward(
    total: Tensor,
    picked: Tensor,
    x: Tensor,
    maximum: Tensor,
    target: Tensor,
    position: Tensor | None,
    bounds: list[int],
    ignored: int,
) -> Tensor:
    start, stop = span_of(position, bounds)
    own = within(target, start, stop, bounds[-1], ignored)
    place, addend = own.clamp(min=0).unsqueeze(1), picked.masked_fill(own < 0, 0).unsqueeze(1)
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    gradient.narrow(1, stop - start, x.shape[1] - (stop - start)).zero_()
    if start == stop:
        return gradient
    x, slopes = x.narrow(1, 0, stop - start), gradient.narrow(1, 0, stop - start)
    for rows in _rows(x):
        part = (x[rows].to(total.dtype) - maximum[rows].unsqueeze(1)).exp_().mul_(total[rows].unsqueeze(1))
        slopes[rows] = part.scatter_add_(1, place[rows], addend[rows])
    return gradient


def _class_terms_formula(
    x: Tensor, maximum: Tensor, target: Tensor, position: Tensor | None, bounds: list[int], ignored: int
) -> tuple[Tensor, Tensor]:
    own, inside, padding = _own_formula(x, target, position, bounds, ignored)
    dtype = wide(x.dtype)
    powers = (x.to(dtype) - maximum.unsqueeze(1)).exp()
    total = (powers if padding is None else powers.masked_fill(padding, 0)).sum(1)
    picked = x.gather(1, own.unsqueeze(1)).squeeze(1).to(dtype) - maximum
    return total, picked.where(inside, 0)


def _class_terms_backward_formula(
    total: Tensor,
    picked: Tensor,
    x: Tensor,
    maximum: Tensor,
    target: Tensor,
    position: Tensor | None,
    bounds: list[int],
    ignored: int,
) -> Tensor:
    own, inside, padding = _own_formula(x, target, position, bounds, ignored)
    chosen = _classes(x) == own.unsqueeze(1)
    slopes = (x.to(total.dtype) - maximum.unsqueeze(1)).exp() * total.unsqueeze(1)
    slopes = slopes + picked.where(inside, 0).unsqueeze(1).where(chosen, 0)
    return (slopes if padding is None else slopes.masked_fill(padding, 0)).to(x.dtype)


def _own_formula(
    x: Tensor, target: Tensor, position: Tensor | None, bounds: list[int], ignored: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The index of each target among this rank's classes, 0 for one elsewhere or ignored; a mask of this rank's
    targets; and a mask of the padding among the classes. Fails like `within` for an index outside of all classes."""
    target = target.long()
    within_all = (target >= 0) & (target < bounds[-1])
    aten._assert_async.msg((within_all | (target == ignored)).all(), out_of_range(bounds[-1]))
    inside = within_all & (target != ignored)
    if position is None:
        return target.where(inside, 0), inside, None
    start, stop = _span_formula(position.to(x.device), bounds)
    inside = inside & (target >= start) & (target < stop)
    return (target - start).where(inside, 0), inside, _classes(x) >= stop - start


def _span_formula(place: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """`span_of` as tensors, without a device synchronisation for the position."""
    start = stop = bounds[0] + torch.zeros_like(place)
    for i, (low, high) in enumerate(pairwise(bounds)):
        start, stop = start + (high - low) * (place > i), stop + (high - low) * (place >= i)
    return start, stop


def _classes(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).view(-1, *[1] * (x.dim() - 2))


def _fake_class_terms(x: Tensor, maximum: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return maximum.new_empty(maximum.shape, dtype=wide(x.dtype)), maximum.new_empty(maximum.shape, dtype=wide(x.dtype))


def _fake_class_terms_backward(total: Tensor, picked: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bounds, ctx.ignored = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, total: Tensor, picked: Tensor) -> tuple[Tensor | None, ...]:
    """The maximum gets no gradient: the loss does not depend on it."""
    gradient = class_terms_backward(total, picked, *ctx.saved_tensors, ctx.bounds, ctx.ignored)
    return gradient, None, None, None, None, None


# -- The operators

_CLASS_ARGUMENTS = "Tensor x, Tensor maximum, Tensor target, Tensor? position, int[] bounds, int ignored"
class_terms = define(
    f"class_terms({_CLASS_ARGUMENTS}) -> (Tensor, Tensor)",
    _class_terms,
    _fake_class_terms,
    backward=_backward,
    keep=_keep_context,
    formula=_class_terms_formula,
)
class_terms_backward = define(
    f"class_terms_backward(Tensor total, Tensor picked, {_CLASS_ARGUMENTS}) -> Tensor",
    _class_terms_backward,
    _fake_class_terms_backward,
    formula=_class_terms_backward_formula,
)
