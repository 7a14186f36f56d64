"""Operators of a mixture of experts: rows are copies of tokens, one for each expert of a token, sorted by expert.

`where` gives each row its *slot*, token * k + j for the j-th of the k experts of a token.

partway::dispatch(x, ids, experts, weights)
                                          the rows of the tokens x[T, d] for the experts ids[T, k], times weights[T, k]
                                          if given; the end of each expert's rows (int32); and `where`
partway::combine(rows, where, weights)    for each token the sum of its rows, times its weights[T, k]

partway::grouped_matmul(rows, weights, offsets)
                                          each expert's rows times its matrix weights[e]
partway::per_expert(x, offsets, rows)     for each of `rows` what x[e] has of its expert
partway::grouped_outer(a, b, offsets)     for each expert the product of its rows a, transposed, with its rows b

Plans split the first four (`rules/layers/experts.py`). The following are in local forms and gradients. `expected` is a
number of rows for planning: the real one is known when the operator runs.

partway::route(ids, places, widths, sizes, experts, expected)
                                          `where`, and the number of rows of each expert (int32), of the experts e with
                                          (e // widths[i]) % sizes[i] == places[i] for all i
partway::counted(counts, copy, part, allowed, layer)
                                          counts[e] or counts[n, e], the rows of the `part`-th experts of `layer`, after
                                          who listens has heard of them, of ranks with copies from the first. More than
                                          `allowed` (-1: any number) are warned of
partway::route_once(ids, widths, sizes, experts, expected)
                                          the tokens that have an expert of each part of the experts, sorted by part,
                                          and the number of those of each (int32). The part of an expert has the digit
                                          (e // widths[i]) % sizes[i] for each i, major first
partway::parted(x, counts, expected, others)
                                          the first counts.sum() elements of x, and the others
partway::take_rows(x, where, each, like)  x[where // each]; `like`, if given, has as many rows as x
partway::take_weights(weights, where)     the weight of each row, as a column
partway::give_rows(rows, where, each, tokens, like)
                                          its transpose: the sum of its rows for each of `tokens`, or of those of `like`
partway::arrival(received, expected)      for each row, sorted by expert, its place among rows that arrived sorted by
                                          sender and then by expert; received[n, e] has their numbers
partway::reorder(x, order, back)          x[order], or with `back` the tensor of which this is x
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ...strategy.errors import ExpertLoadWarning
from .dtypes import wide
from .keyed import LISTENERS
from .registration import define


def _dispatch(x: Tensor, ids: Tensor, experts: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    where, counts = _route(ids, [], [], [], experts, ids.numel())
    rows = _take_rows(x, where, ids.shape[1])
    if weights is not None:
        rows = (rows * _take_weights(weights, where)).to(x.dtype)
    return rows, counts.cumsum(0, dtype=torch.int32), where


def _combine(rows: Tensor, where: Tensor, weights: Tensor) -> Tensor:
    return _give_rows(rows * _take_weights(weights, where), where, weights.shape[1], weights.shape[0])


def _take_weights(weights: Tensor, where: Tensor) -> Tensor:
    return weights.reshape(-1)[where].unsqueeze(1)


def _grouped_matmul(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    if _has_kernel(rows, weights):
        product: Tensor = torch.ops.aten._grouped_mm.default(rows, weights, offsets)
        return product
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, (start, stop) in enumerate(_groups(offsets)):
        torch.mm(rows[start:stop], weights[expert], out=out[start:stop])
    return out


def _grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if _has_kernel(a, b):
        product: Tensor = torch.ops.aten._grouped_mm.default(a.t(), b, offsets)
        return product
    out = a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
    for expert, (start, stop) in enumerate(_groups(offsets)):
        torch.mm(a[start:stop].t(), b[start:stop], out=out[expert])
    return out


def _per_expert(x: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    return torch.repeat_interleave(x, _sizes(offsets), 0, output_size=rows.shape[0])


def _sum_groups(rows: Tensor, offsets: Tensor) -> Tensor:
    return _added(rows, torch.repeat_interleave(_sizes(offsets), output_size=rows.shape[0]), len(offsets))


def _added(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """For each of `count` places the sum of its rows."""
    dtype = wide(rows.dtype)
    return rows.new_zeros(count, *rows.shape[1:], dtype=dtype).index_add_(0, places, rows.to(dtype)).to(rows.dtype)


def _sizes(offsets: Tensor) -> Tensor:
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether `_grouped_mm` takes two operands: on CUDA it is fast in bfloat16 alone, and rows are multiples of 16
    bytes."""
    sizes = (a.stride(0), *b.shape[-2:]) if b.ndim == 3 else (a.shape[1], b.shape[1])
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def _groups(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _route(
    ids: Tensor, places: list[Tensor], widths: list[int], sizes: list[int], experts: int, expected: int
) -> tuple[Tensor, Tensor]:
    flat = ids.reshape(-1)
    _check_range(flat, experts)
    order, counts = torch.argsort(flat, stable=True), torch.bincount(flat, minlength=experts).int()
    if not places:
        return order, counts
    every = torch.arange(experts, device=flat.device)
    own = torch.ones_like(every, dtype=torch.bool)
    for place, width, size in zip(places, widths, sizes, strict=True):
        own &= every // width % size == int(place)
    return order[own[flat[order]]], counts[own]


def _check_range(ids: Tensor, experts: int) -> None:
    wrong = (ids < 0) | (ids >= experts)
    if ids.device.type != "cpu":
        torch.ops.aten._assert_async.msg(~wrong.any(), f"the number of an expert is out of range of {experts}")
    elif wrong.any():
        raise IndexError(f"expert {int(ids[wrong][0])} is out of range of {experts} experts")


def _counted(counts: Tensor, copy: Tensor, part: Tensor, allowed: int, layer: str) -> Tensor:
    if not LISTENERS and allowed < 0:
        return counts.clone()
    rows = counts.reshape(-1, counts.shape[-1]).sum(0)
    first = int(part) * len(rows)
    for hear in tuple(LISTENERS.values()) if int(copy) == 0 else ():
        hear(layer, first, rows)
    if allowed >= 0 and int(rows.sum()) > allowed:
        last = first + len(rows) - 1
        warnings.warn(
            f"{layer}: the ranks with experts {first} to {last} got more rows than expert_load allows, most of them "
            f"for expert {first + int(rows.argmax())}; the step goes on, with more memory than planned "
            "(pw.record_expert_load says how many)",
            ExpertLoadWarning,
            stacklevel=2,
        )
    return counts.clone()


def _route_once(ids: Tensor, widths: list[int], sizes: list[int], experts: int, expected: int) -> tuple[Tensor, Tensor]:
    _check_range(ids, experts)
    every = torch.arange(experts, device=ids.device)
    part = torch.zeros_like(every)
    for width, size in zip(widths, sizes, strict=True):
        part = part * size + every // width % size
    wanted = torch.zeros(math.prod(sizes), ids.shape[0], dtype=torch.bool, device=ids.device)
    wanted[part[ids].t(), torch.arange(ids.shape[0], device=ids.device)] = True
    return wanted.nonzero()[:, 1], wanted.sum(1).int()


def _parted(x: Tensor, counts: Tensor, expected: int, others: int) -> tuple[Tensor, Tensor]:
    first = int(counts.sum())
    return x[:first].clone(), x[first:].clone()


def _take_rows(x: Tensor, where: Tensor, each: int, like: Tensor | None = None) -> Tensor:
    return x[where // each]


def _give_rows(rows: Tensor, where: Tensor, each: int, tokens: int, like: Tensor | None = None) -> Tensor:
    tokens = tokens if like is None else like.shape[0]
    if where.numel() == tokens * each:  # every slot has a row: sums are in the order of slots
        placed = _reorder(rows, where, True)
        return placed if each == 1 else placed.view(tokens, each, *rows.shape[1:]).sum(1)
    return _added(rows, where // each, tokens)


def _arrival(received: Tensor, expected: int) -> Tensor:
    counts = received.long()
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().flatten()
    sizes = counts.t().flatten()
    shift = starts - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(shift, sizes) + torch.arange(int(sizes.sum()), device=received.device)


def _reorder(x: Tensor, order: Tensor, back: bool) -> Tensor:
    if not back:
        return x[order]
    placed = torch.empty_like(x, memory_format=torch.contiguous_format)
    placed[order] = x
    return placed


def _fake_dispatch(
    x: Tensor, ids: Tensor, experts: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    many = ids.numel()
    return (
        x.new_empty(many, x.shape[1]),
        ids.new_empty(experts, dtype=torch.int32),
        ids.new_empty(many, dtype=torch.int64),
    )


def _fake_combine(rows: Tensor, where: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1], dtype=torch.promote_types(rows.dtype, weights.dtype))


def _fake_grouped_matmul(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _fake_grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _fake_per_expert(x: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(rows.shape[0], *x.shape[1:])


def _fake_sum_groups(rows: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(offsets.shape[0], *rows.shape[1:])


def _fake_route(
    ids: Tensor, places: list[Tensor], widths: list[int], sizes: list[int], experts: int, expected: int
) -> tuple[Tensor, Tensor]:
    for size in sizes:
        experts //= size
    return ids.new_empty(expected, dtype=torch.int64), ids.new_empty(experts, dtype=torch.int32)


def _fake_counted(counts: Tensor, copy: Tensor, part: Tensor, allowed: int, layer: str) -> Tensor:
    return torch.empty_like(counts, memory_format=torch.contiguous_format)


def _fake_route_once(
    ids: Tensor, widths: list[int], sizes: list[int], experts: int, expected: int
) -> tuple[Tensor, Tensor]:
    return ids.new_empty(expected, dtype=torch.int64), ids.new_empty(math.prod(sizes), dtype=torch.int32)


def _fake_parted(x: Tensor, counts: Tensor, expected: int, others: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(expected), x.new_empty(others)


def _fake_take_rows(x: Tensor, where: Tensor, each: int, like: Tensor | None = None) -> Tensor:
    return x.new_empty(where.shape[0], *x.shape[1:])


def _fake_take_weights(weights: Tensor, where: Tensor) -> Tensor:
    return weights.new_empty(where.shape[0], 1)


def _fake_give_rows(rows: Tensor, where: Tensor, each: int, tokens: int, like: Tensor | None = None) -> Tensor:
    return rows.new_empty(tokens if like is None else like.shape[0], *rows.shape[1:])


def _fake_arrival(received: Tensor, expected: int) -> Tensor:
    return received.new_empty(expected, dtype=torch.int64)


def _fake_reorder(x: Tensor, order: Tensor, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ids, _, weights = inputs
    ctx.tokens, ctx.each = ids.shape
    ctx.save_for_backward(output[2], *(() if weights is None else (x, weights)))
    ctx.mark_non_differentiable(*output[1:])


def _dispatch_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    where, *weighted = ctx.saved_tensors
    if not weighted:
        return give_rows(grad, where, ctx.each, ctx.tokens), None, None, None
    x, weights = weighted
    of_rows = (grad * take_weights(weights, where)).to(x.dtype)
    of_weights = _of_weights(grad * take_rows(x, where, ctx.each), where, weights)
    return give_rows(of_rows, where, ctx.each, ctx.tokens), None, None, of_weights


def _of_weights(products: Tensor, where: Tensor, weights: Tensor) -> Tensor:
    """The gradient of weights, of the `products` that their rows add to it."""
    sums: Tensor = give_rows(products.sum(1), where, 1, 0, weights.reshape(-1))
    return sums.view(-1, weights.shape[1]).to(weights.dtype)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, where, weights = ctx.saved_tensors
    taken = take_rows(grad, where, weights.shape[1])
    of_rows = taken * take_weights(weights, where)
    return of_rows.to(rows.dtype), None, _of_weights(taken * rows, where, weights)


def _weights_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights, where = ctx.saved_tensors
    return _of_weights(grad, where, weights), None


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, offsets = ctx.saved_tensors
    of_rows, of_weights, _ = ctx.needs_input_grad
    return (
        grouped_matmul(grad, weights.transpose(1, 2), offsets) if of_rows else None,
        grouped_outer(rows, grad, offsets) if of_weights else None,
        None,
    )


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets = ctx.saved_tensors
    return grouped_matmul(b, grad.transpose(1, 2), offsets), grouped_matmul(a, grad, offsets), None


def _keep_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _per_expert_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return sum_groups(grad, *ctx.saved_tensors), None, None


def _sum_groups_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, offsets = ctx.saved_tensors
    return per_expert(grad, offsets, rows), None


def _keep_taken(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, where, ctx.each, like = inputs
    ctx.tokens = x.shape[0] if like is None else 0
    ctx.save_for_backward(where, like)


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    where, like = ctx.saved_tensors
    return give_rows(grad, where, ctx.each, ctx.tokens, like), None, None, None


def _keep_given(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, where, ctx.each, _, like = inputs
    ctx.save_for_backward(where, like)


def _give_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    where, like = ctx.saved_tensors
    return take_rows(grad, where, ctx.each, like), None, None, None, None


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, ctx.back = inputs
    ctx.save_for_backward(order)


def _reorder_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return reorder(grad, *ctx.saved_tensors, not ctx.back), None, None


# -- The operators

dispatch = define(
    "dispatch(Tensor x, Tensor ids, int experts, Tensor? weights=None) -> (Tensor rows, Tensor offsets, Tensor where)",
    _dispatch,
    _fake_dispatch,
    backward=_dispatch_backward,
    keep=_keep_dispatch,
    fresh=True,
)
combine = define(
    "combine(Tensor rows, Tensor where, Tensor weights) -> Tensor",
    _combine,
    _fake_combine,
    backward=_combine_backward,
    keep=_keep_operands,
    fresh=True,
)
grouped_matmul = define(
    "grouped_matmul(Tensor rows, Tensor weights, Tensor offsets) -> Tensor",
    _grouped_matmul,
    _fake_grouped_matmul,
    backward=_matmul_backward,
    keep=_keep_operands,
    fresh=True,
)
grouped_outer = define(
    "grouped_outer(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    _grouped_outer,
    _fake_grouped_outer,
    backward=_outer_backward,
    keep=_keep_operands,
    fresh=True,
)
per_expert = define(
    "per_expert(Tensor x, Tensor offsets, Tensor rows) -> Tensor",
    _per_expert,
    _fake_per_expert,
    backward=_per_expert_backward,
    keep=_keep_offsets,
    fresh=True,
)
sum_groups = define(
    "sum_groups(Tensor rows, Tensor offsets) -> Tensor",
    _sum_groups,
    _fake_sum_groups,
    backward=_sum_groups_backward,
    keep=_keep_operands,
    fresh=True,
)
route = define(
    "route(Tensor ids, Tensor[] places, int[] widths, int[] sizes, int experts, int expected) "
    "-> (Tensor where, Tensor counts)",
    _route,
    _fake_route,
    fresh=True,
)
LAYER = 4  # the place of the layer among the arguments of `counted`
counted = define(
    "counted(Tensor counts, Tensor copy, Tensor part, int allowed, str layer) -> Tensor",
    _counted,
    _fake_counted,
    fresh=True,
)
route_once = define(
    "route_once(Tensor ids, int[] widths, int[] sizes, int experts, int expected) -> (Tensor where, Tensor counts)",
    _route_once,
    _fake_route_once,
    fresh=True,
)
parted = define(
    "parted(Tensor x, Tensor counts, int expected, int others) -> (Tensor first, Tensor rest)",
    _parted,
    _fake_parted,
    fresh=True,
)
take_rows = define(
    "take_rows(Tensor x, Tensor where, int each, Tensor? like=None) -> Tensor",
    _take_rows,
    _fake_take_rows,
    backward=_take_backward,
    keep=_keep_taken,
    fresh=True,
)
take_weights = define(
    "take_weights(Tensor weights, Tensor where) -> Tensor",
    _take_weights,
    _fake_take_weights,
    backward=_weights_backward,
    keep=_keep_operands,
    fresh=True,
)
give_rows = define(
    "give_rows(Tensor rows, Tensor where, int each, int tokens, Tensor? like=None) -> Tensor",
    _give_rows,
    _fake_give_rows,
    backward=_give_backward,
    keep=_keep_given,
    fresh=True,
)
arrival = define("arrival(Tensor received, int expected) -> Tensor", _arrival, _fake_arrival, fresh=True)
reorder = define(
    "reorder(Tensor x, Tensor order, bool back) -> Tensor",
    _reorder,
    _fake_reorder,
    backward=_reorder_backward,
    keep=_keep_order,
    fresh=True,
)
