"""Strides: tensors at run time have the strides with which their graph was traced.

Autograd's formulas bring tensors into one memory format while a graph is traced, and leave no operator where the traced
strides agree already. Some kernels, such as GroupNorm's backward, silently compute wrong numbers for other strides. So
the strides of each result are compared with those of its fake tensor, and the result is copied if a kernel differs from
its meta kernel: usually this is only a comparison of two tuples. Conversions that move data return contiguous tensors,
and some kernels determine the strides (`follows`): these are checked only with PARTWAY_VERIFY=1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...propagation.torch_internals import OpOverload
from ...strategy.errors import VerifyError

Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """The strides of a new tensor of `shape`, also along dims of one element, which `is_contiguous` overlooks."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def strides_of(val: Any) -> Strides | None:
    """The strides of a traced value; None where it is not a dense tensor."""
    return val.stride() if isinstance(val, Tensor) and val.layout is torch.strided else None


def follows(node: fx.Node) -> bool:
    """Whether the result of an operator has the traced strides if its operands have theirs: the strides of a view
    follow from the places of its elements (except along dims of size 1), and some kernels preserve contiguity."""
    op, val = node.target, node.meta.get("val")
    strides = strides_of(val)
    if not isinstance(op, OpOverload) or val is None or strides is None:
        return False
    if op.is_view:
        return min(val.shape, default=2) > 1
    if strides != contiguous_strides(val.shape):
        return False
    operands: list[Any] = [operand.meta.get("val") for operand in node.all_input_nodes]
    if op in _CONTIGUOUS:
        return True
    if torch.Tag.pointwise in op.tags:
        return all(strides_of(x) == () or (strides_of(x) == strides and x.shape == val.shape) for x in operands)
    return op in _REDUCTIONS and all(strides_of(x) == contiguous_strides(x.shape) for x in operands)


_aten = torch.ops.aten
_CONTIGUOUS = {_aten.addmm.default, _aten.bmm.default, _aten.mm.default}
_REDUCTIONS = {_aten.mean.dim, _aten.sum.dim_IntList, _aten.mean.default, _aten.sum.default}


def is_loose(node: fx.Node) -> bool:
    """Whether only products and lookups read a value, which accept any strides."""
    return bool(node.users) and all(user.target in _LOOSE for user in node.users)


_LOOSE = {_aten.embedding.default, _aten.linear.default, _aten.mm.default}


def laid_out(x: Tensor, strides: Strides) -> Tensor:
    """`x` with these strides: itself if it has them, a view if only dims of size 1 differ, else a copy. Overlapping
    `strides` are ignored."""
    if x.stride() == strides:
        return x
    if not x.numel() or all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)
    if _overlap(x.shape, strides):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _overlap(shape: Sequence[int], strides: Strides) -> bool:
    """Whether the elements of a dim share memory. Some meta kernels report such strides for a new tensor (that of
    diagonal_scatter does in PyTorch 2.11, for an expanded operand), which then keeps its actual strides."""
    return any(stride == 0 and n > 1 for n, stride in zip(shape, strides, strict=True))


def contiguous(x: Tensor) -> Tensor:
    """`x` as a contiguous tensor with the strides of a new one."""
    x = x.contiguous()
    return laid_out(x, contiguous_strides(x.shape)) if 1 in x.shape or not x.numel() else x


def check_laid_out(x: Any, like: Tensor, name: str) -> None:
    """Raise VerifyError unless `x`, the value `name` of a program, has the traced shape and strides. (The dtype may
    differ: statistics of a norm in bfloat16 are float32, unlike its meta kernel's, and only its backward reads them.
    The strides of empty tensors do not matter, nor do bytes that a kernel keeps for its backward, whose number no meta
    kernel knows.)"""
    if like.dtype is torch.uint8 and like.shape == (0,):
        return
    compares = like.numel() and not _overlap(like.shape, like.stride())
    actual, traced = ((tuple(t.shape), t.stride() if compares else ()) for t in (x, like))
    if actual != traced:
        raise VerifyError(f"{name} has the shape and strides {actual}, and was traced with {traced}")
