"""Operators whose result depends on the rank's part of a dim, as told by `position` (`indexing.py`).

partway::of_rank(like, position, values, count, dtype)
                                this rank's `count` of the numbers `values`, which has `count` for each rank, on the
                                device of `like`
partway::part_slice(x, position, dim, starts, length)
                                `length` elements of x along `dim` from `starts[position]` on
partway::causal_mask(queries, position, starts, keys)
                                a mask of the keys that a rank's queries (dim -2) see; the first query has the index
                                `starts[position]`
partway::others_rows(offsets, position, part, rows)
                                a mask, of one column, of those of `rows` rows that are outside this rank's `part`
                                groups; groups end at `offsets`
partway::regular(like)          an invertible matrix with the last dims of `like` and distinct eigenvalues; for integer
                                pivots, those that exchange nothing
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registration import define


def _of_rank(like: Tensor, position: Tensor, values: list[float], count: int, dtype: torch.dtype) -> Tensor:
    start = int(position) * count
    return torch.tensor(values[start : start + count], dtype=torch.float64).to(dtype).to(like.device)


def _part_slice(x: Tensor, position: Tensor, dim: int, starts: list[int], length: int) -> Tensor:
    return x.narrow(dim, starts[int(position)], length).clone(memory_format=torch.contiguous_format)


def _part_slice_backward(grad: Tensor, position: Tensor, dim: int, starts: list[int], size: int) -> Tensor:
    whole = grad.new_zeros(_resized(grad, dim, size))
    whole.narrow(dim, starts[int(position)], grad.shape[dim]).copy_(grad)
    return whole


def _causal_mask(queries: Tensor, position: Tensor, starts: list[int], keys: int) -> Tensor:
    rows = torch.arange(queries.shape[-2], device=queries.device).unsqueeze(1) + starts[int(position)]
    return rows >= torch.arange(keys, device=queries.device)


def _others_rows(offsets: Tensor, position: Tensor, part: int, rows: int) -> Tensor:
    bounds = torch.cat([offsets.new_zeros(1), offsets])
    start, stop = bounds[int(position) * part], bounds[(int(position) + 1) * part]
    row = torch.arange(rows, device=offsets.device)
    return ((row < start) | (row >= stop)).unsqueeze(1)


def _regular(like: Tensor) -> Tensor:
    if not (like.is_floating_point() or like.is_complex()):
        return torch.arange(1, like.shape[-1] + 1, dtype=like.dtype, device=like.device)
    matrix = like.new_zeros(like.shape[-2:])
    count = min(matrix.shape)
    matrix.diagonal().copy_(1 + torch.arange(count, device=like.device) / max(count, 1) ** 2)
    return matrix


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [size if d == dim else extent for d, extent in enumerate(x.shape)]


def _fake_of_rank(like: Tensor, position: Tensor, values: list[float], count: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(count, dtype=dtype)


def _fake_part_slice(x: Tensor, position: Tensor, dim: int, starts: list[int], length: int) -> Tensor:
    return x.new_empty(_resized(x, dim, length))


def _fake_part_slice_backward(grad: Tensor, position: Tensor, dim: int, starts: list[int], size: int) -> Tensor:
    return grad.new_empty(_resized(grad, dim, size))


def _fake_causal_mask(queries: Tensor, position: Tensor, starts: list[int], keys: int) -> Tensor:
    return queries.new_empty(queries.shape[-2], keys, dtype=torch.bool)


def _fake_others_rows(offsets: Tensor, position: Tensor, part: int, rows: int) -> Tensor:
    return offsets.new_empty(rows, 1, dtype=torch.bool)


def _fake_regular(like: Tensor) -> Tensor:
    numbers = like.is_floating_point() or like.is_complex()
    return like.new_empty(like.shape[-2:] if numbers else like.shape[-1:])


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, position, ctx.dim, ctx.starts, _ = inputs
    ctx.size = x.shape[ctx.dim]
    ctx.save_for_backward(position)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (position,) = ctx.saved_tensors
    return part_slice_backward(grad, position, ctx.dim, ctx.starts, ctx.size), None, None, None, None


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, position, ctx.dim, ctx.starts, _ = inputs
    ctx.length = grad.shape[ctx.dim]
    ctx.save_for_backward(position)


def _back_from_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (position,) = ctx.saved_tensors
    return part_slice(grad, position, ctx.dim, ctx.starts, ctx.length), None, None, None, None


# -- The operators

of_rank = define(
    "of_rank(Tensor like, Tensor position, float[] values, int count, ScalarType dtype) -> Tensor",
    _of_rank,
    _fake_of_rank,
)
part_slice = define(
    "part_slice(Tensor x, Tensor position, int dim, int[] starts, int length) -> Tensor",
    _part_slice,
    _fake_part_slice,
    backward=_backward,
    keep=_keep_context,
)
part_slice_backward = define(
    "part_slice_backward(Tensor grad, Tensor position, int dim, int[] starts, int size) -> Tensor",
    _part_slice_backward,
    _fake_part_slice_backward,
    backward=_back_from_backward,
    keep=_keep_for_backward,
)
causal_mask = define(
    "causal_mask(Tensor queries, Tensor position, int[] starts, int keys) -> Tensor", _causal_mask, _fake_causal_mask
)
others_rows = define(
    "others_rows(Tensor offsets, Tensor position, int part, int rows) -> Tensor", _others_rows, _fake_others_rows
)
regular = define("regular(Tensor like) -> Tensor", _regular, _fake_regular)
