"""Operators that look up an index in a dim of which a rank may hold a part: embedding rows, and classes.

    partway::position(axes, sizes)            which part along `axes` together this rank has (0-dim, int64, on the CPU):
                                              a symbol, which the executors of `runtime/` give its meaning
    partway::part_index(index, position, bounds, wraps)
                                              `index` counted from the start of this rank's part of a dim, which goes
                                              from bounds[position] to the next of `bounds`, and -1 where it is another
                                              rank's; one that `wraps` may be negative, counted from the end of the dim
    partway::behind(x, position, dim, counts) where this rank's part is behind the end of its slice along `dim`, of
                                              `counts[position]` elements: a mask that broadcasts to x
    partway::class_terms(x, maximum, target, position, bounds, ignored)
                                              the two sums over classes that cross entropy is made of, of which a rank
                                              has those from bounds[position] on (no position: all)

With a maximum m over all classes, `cross_entropy = log(sum of exp(x - m)) - (x - m)[target]`. Both terms are sums to
which every part of the classes has an addend, so logits whose classes are split are never gathered. One operator
computes both, a few rows at a time: of the logits' size it keeps nothing but the logits, and its backward makes
nothing but their gradient. It computes in float32 where the logits are of a lower precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_LIBRARY = torch.library.Library("partway", "FRAGMENT")
_CLASS_ARGUMENTS = "Tensor x, Tensor maximum, Tensor target, Tensor? position, int[] bounds, int ignored"
_LIBRARY.define("position(str[] axes, int[] sizes) -> Tensor")
_LIBRARY.define("part_index(Tensor index, Tensor position, int[] bounds, bool wraps=False) -> Tensor")
_LIBRARY.define("behind(Tensor x, Tensor position, int dim, int[] counts) -> Tensor")
_LIBRARY.define(f"class_terms({_CLASS_ARGUMENTS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"class_terms_backward(Tensor total, Tensor picked, {_CLASS_ARGUMENTS}) -> Tensor")

position = torch.ops.partway.position.default
part_index = torch.ops.partway.part_index.default
behind = torch.ops.partway.behind.default
class_terms = torch.ops.partway.class_terms.default
class_terms_backward = torch.ops.partway.class_terms_backward.default

# Logits taken at once: what stays in a processor's cache; on other devices few launches, and 256 MB of float32.
_AT_ONCE = {"cpu": 2**18}
_AT_ONCE_ELSEWHERE = 2**26


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _span(position: Tensor | None, bounds: list[int]) -> tuple[int, int]:
    """What this rank has of a dim that is cut at `bounds`."""
    place = 0 if position is None else int(position)
    return bounds[place], bounds[place + 1]


def _within(index: Tensor, start: int, stop: int, whole: int, ignored: int | None = None) -> Tensor:
    """`index - start` as int64, or -1 outside of the part from there to `stop`, or where it is `ignored`. Raises
    IndexError for an index outside of `whole` (on a device its own assertion fails, so that nothing waits for it)."""
    index = index.long()
    wrong = (index < 0) | (index >= whole)
    if ignored is not None:
        wrong &= index != ignored
    if index.device.type != "cpu":
        aten._assert_async.msg(~wrong.any(), f"an index is out of range of a dim of size {whole}")
    elif wrong.any():
        raise IndexError(f"index {int(index[wrong][0])} is out of range of a dim of size {whole}")
    outside = (index < start) | (index >= stop)
    if ignored is not None:
        outside |= index == ignored
    return (index - start).masked_fill_(outside, -1)


def _part_index(index: Tensor, position: Tensor, bounds: list[int], wraps: bool = False) -> Tensor:
    if wraps:
        index = torch.where(index < 0, index + bounds[-1], index)
    return _within(index, *_span(position, bounds), bounds[-1])


def _behind(x: Tensor, position: Tensor, dim: int, counts: list[int]) -> Tensor:
    place = torch.arange(x.shape[dim], device=x.device)
    return (place >= counts[int(position)]).view(_behind_shape(x, dim))


def _behind_shape(x: Tensor, dim: int) -> list[int]:
    return [size if d == dim else 1 for d, size in enumerate(x.shape)]


def _rows(x: Tensor) -> Iterator[slice]:
    """Slices of dim 0 of `x` with not too many elements."""
    elements = _AT_ONCE.get(x.device.type, _AT_ONCE_ELSEWHERE)
    count = max(1, elements // max(1, x[:1].numel()))
    return (slice(start, start + count) for start in range(0, len(x), count))


def _class_terms(
    x: Tensor, maximum: Tensor, target: Tensor, position: Tensor | None, bounds: list[int], ignored: int
) -> tuple[Tensor, Tensor]:
    start, stop = _span(position, bounds)
    own = _within(target, start, stop, bounds[-1], ignored)
    x = x.narrow(1, 0, stop - start)
    total = torch.zeros_like(maximum, dtype=wide(x.dtype), memory_format=torch.contiguous_format)
    if start == stop:
        return total, torch.zeros_like(total)
    for rows in _rows(x):
        total[rows] = (x[rows].to(total.dtype) - maximum[rows].unsqueeze(1)).exp_().sum(1)
    found = x.gather(1, own.clamp(min=0).unsqueeze(1)).squeeze(1)
    return total, (found.to(total.dtype) - maximum).masked_fill_(own < 0, 0)


def _class_terms_backward(
    total: Tensor, picked: Tensor, x: Tensor, maximum: Tensor, target: Tensor, position: Tensor | None,
    bounds: list[int], ignored: int,
) -> Tensor:  # fmt: skip
    start, stop = _span(position, bounds)
    own = _within(target, start, stop, bounds[-1], ignored)
    place, addend = own.clamp(min=0).unsqueeze(1), picked.masked_fill(own < 0, 0).unsqueeze(1)
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    gradient.narrow(1, stop - start, x.shape[1] - (stop - start)).zero_()
    if start == stop:
        return gradient
    x, made = x.narrow(1, 0, stop - start), gradient.narrow(1, 0, stop - start)
    for rows in _rows(x):
        part = (x[rows].to(total.dtype) - maximum[rows].unsqueeze(1)).exp_().mul_(total[rows].unsqueeze(1))
        made[rows] = part.scatter_add_(1, place[rows], addend[rows])
    return gradient


for _name, _function in (
    ("part_index", _part_index),
    ("behind", _behind),
    ("class_terms", _class_terms),
    ("class_terms_backward", _class_terms_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("partway::position")  # type: ignore[untyped-decorator]
def _fake_position(axes: list[str], sizes: list[int]) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.register_fake("partway::part_index")  # type: ignore[untyped-decorator]
def _fake_part_index(index: Tensor, position: Tensor, bounds: list[int], wraps: bool = False) -> Tensor:
    return torch.empty_like(index, dtype=torch.int64)


@torch.library.register_fake("partway::behind")  # type: ignore[untyped-decorator]
def _fake_behind(x: Tensor, position: Tensor, dim: int, counts: list[int]) -> Tensor:
    return x.new_empty(_behind_shape(x, dim), dtype=torch.bool)


@torch.library.register_fake("partway::class_terms")  # type: ignore[untyped-decorator]
def _fake_class_terms(x: Tensor, maximum: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return maximum.new_empty(maximum.shape, dtype=wide(x.dtype)), maximum.new_empty(maximum.shape, dtype=wide(x.dtype))


@torch.library.register_fake("partway::class_terms_backward")  # type: ignore[untyped-decorator]
def _fake_class_terms_backward(total: Tensor, picked: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bounds, ctx.ignored = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, total: Tensor, picked: Tensor) -> tuple[Tensor | None, ...]:
    """The maximum gets no gradient: the loss does not depend on it."""
    gradient = class_terms_backward(total, picked, *ctx.saved_tensors, ctx.bounds, ctx.ignored)
    return gradient, None, None, None, None, None


torch.library.register_autograd("partway::class_terms", _backward, setup_context=_keep_context)
