"""Strides: at run time a tensor has those with which its graph was traced.

Autograd's formulas bring tensors into one memory format while a graph is traced, and leave no operator where the traced
strides agree already. A kernel that reads other strides then, as those of GroupNorm's backward do, gives other numbers
without a word. So what an operator gives is compared with what its fake tensor had, and laid out anew where a kernel
differs from its meta kernel: a comparison of two tuples, and almost never more. What a conversion moves is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..strategy.errors import VerifyError

Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """The strides of a new tensor of `shape`, also along dims of one element, which `is_contiguous` overlooks."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def strides_of(val: Any) -> Strides | None:
    """The strides of a traced value; None of what is no dense tensor."""
    return val.stride() if isinstance(val, Tensor) and val.layout is torch.strided else None


def laid_out(x: Tensor, strides: Strides) -> Tensor:
    """`x` with these strides: as it is, if it has them, else a copy. (Those of dims of one element are only said.)"""
    if x.stride() == strides:
        return x
    if not x.numel() or all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def contiguous(x: Tensor) -> Tensor:
    """`x` as a contiguous tensor with the strides of a new one."""
    x = x.contiguous()
    return laid_out(x, contiguous_strides(x.shape)) if 1 in x.shape or not x.numel() else x


def check_laid_out(x: Any, like: Tensor, name: str) -> None:
    """Raise VerifyError unless `x`, the value `name` of a program, lies in memory as what was traced for it. (The
    statistics of a norm in bfloat16 are float32, which its meta kernel does not say; only its backward reads them.)"""
    found, traced = ((tuple(t.shape), t.stride()) for t in (x, like))
    if found != traced:
        raise VerifyError(f"{name} has the shape and strides {found}, and was traced with {traced}")
