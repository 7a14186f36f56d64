"""Operators whose result depends on which part of a dim a rank has; `position` (`indexing.py`) says which.

partway::of_rank(like, position, values, count, dtype)
                                this rank's `count` of the numbers `values`, which has as many for each rank; on the
                                device of `like`
partway::part_slice(x, position, dim, starts, length)
                                `length` elements of x along `dim` from `starts[position]` on
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("partway", "FRAGMENT")
_LIBRARY.define("of_rank(Tensor like, Tensor position, float[] values, int count, ScalarType dtype) -> Tensor")
_LIBRARY.define("part_slice(Tensor x, Tensor position, int dim, int[] starts, int length) -> Tensor")
_LIBRARY.define("part_slice_backward(Tensor grad, Tensor position, int dim, int[] starts, int size) -> Tensor")

of_rank = torch.ops.partway.of_rank.default
part_slice = torch.ops.partway.part_slice.default
part_slice_backward = torch.ops.partway.part_slice_backward.default


def _of_rank(like: Tensor, position: Tensor, values: list[float], count: int, dtype: torch.dtype) -> Tensor:
    start = int(position) * count
    return torch.tensor(values[start : start + count], dtype=torch.float64).to(dtype).to(like.device)


def _part_slice(x: Tensor, position: Tensor, dim: int, starts: list[int], length: int) -> Tensor:
    return x.narrow(dim, starts[int(position)], length).clone(memory_format=torch.contiguous_format)


def _part_slice_backward(grad: Tensor, position: Tensor, dim: int, starts: list[int], size: int) -> Tensor:
    whole = grad.new_zeros(_resized(grad, dim, size))
    whole.narrow(dim, starts[int(position)], grad.shape[dim]).copy_(grad)
    return whole


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [size if d == dim else extent for d, extent in enumerate(x.shape)]


for _name, _function in (
    ("of_rank", _of_rank),
    ("part_slice", _part_slice),
    ("part_slice_backward", _part_slice_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("partway::of_rank")  # type: ignore[untyped-decorator]
def _fake_of_rank(like: Tensor, position: Tensor, values: list[float], count: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(count, dtype=dtype)


@torch.library.register_fake("partway::part_slice")  # type: ignore[untyped-decorator]
def _fake_part_slice(x: Tensor, position: Tensor, dim: int, starts: list[int], length: int) -> Tensor:
    return x.new_empty(_resized(x, dim, length))


@torch.library.register_fake("partway::part_slice_backward")  # type: ignore[untyped-decorator]
def _fake_part_slice_backward(grad: Tensor, position: Tensor, dim: int, starts: list[int], size: int) -> Tensor:
    return grad.new_empty(_resized(grad, dim, size))


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, position, ctx.dim, ctx.starts, _ = inputs
    ctx.size = x.shape[ctx.dim]
    ctx.save_for_backward(position)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (position,) = ctx.saved_tensors
    return part_slice_backward(grad, position, ctx.dim, ctx.starts, ctx.size), None, None, None, None


torch.library.register_autograd("partway::part_slice", _backward, setup_context=_keep_context)
