"""Operators whose result sizes depend on values, such as `x[mask]` and `x.nonzero()`, with the sizes of one call.

The number of elements is a question about values (questions.py), and so a constant of the course. A stable sort then
finds the places that a mask marks, and a lookup takes their elements: operators of fixed sizes, which split and have
gradients like others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _places(mask: Tensor) -> Tensor:
    """The places in the flattened `mask` of its true elements, in order."""
    flat = mask.reshape(-1)
    marked = int(flat.sum())
    return torch.sort((~flat).to(torch.uint8), stable=True).indices[:marked]


def _columns(mask: Tensor) -> tuple[Tensor, ...]:
    """The index along each dim of the true elements of `mask`."""
    places, columns = _places(mask), list[Tensor]()
    for size in reversed(mask.shape):
        columns.append(places.remainder(size))
        places = places.div(size, rounding_mode="floor")
    return tuple(reversed(columns))


def _nonzero(x: Tensor, *, as_tuple: bool = False) -> Any:
    columns = _columns((x if x.dim() else x.reshape(1)) != 0)
    if as_tuple:
        return columns
    return torch.stack(columns, 1) if x.dim() else columns[0].reshape(-1, 1)[:, :0]


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x.reshape(-1).index_select(0, _places(mask))


def _getitem(x: Tensor, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(map(_is_mask, items)):
        return x[index]
    if len(items) == 1 and items[0].dim() <= x.dim():
        rest = x.shape[items[0].dim() :]
        return x.reshape(-1, *rest).index_select(0, _places(items[0]))
    return x[tuple(part for item in items for part in (_columns(item) if _is_mask(item) else (item,)))]


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is torch.bool and item.dim() > 0


def _where(condition: Tensor, *values: Any, **named: Any) -> Any:
    return torch.where(condition, *values, **named) if values or named else _nonzero(condition, as_tuple=True)


def _repeat_interleave(x: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: Any = None) -> Tensor:
    if repeats is None:
        return _repeated(x)
    if not isinstance(repeats, Tensor) or output_size is not None:
        return torch.repeat_interleave(x, repeats, dim, output_size=output_size)
    if dim is None:
        x, dim = x.reshape(-1), 0
    return x.index_select(dim, _repeated(repeats.reshape(-1).expand(x.shape[dim])))


def _repeated(repeats: Tensor) -> Tensor:
    """The index of each element of `repeats`, repeated that many times."""
    ends = repeats.cumsum(0)
    return torch.searchsorted(ends, torch.arange(int(repeats.sum()), device=repeats.device), right=True)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    size = max(minlength, int(x.max()) + 1 if x.numel() else 0)
    weights = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    weights = weights if weights.dtype in (torch.int64, torch.float32) else weights.double()
    return weights.new_zeros(size).index_add(0, x, weights)


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    return torch.nn.functional.one_hot(x, num_classes if num_classes >= 0 else int(x.max()) + 1)


_SIZED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.argwhere: _nonzero,
    torch.Tensor.bincount: _bincount,
    torch.Tensor.masked_select: _masked_select,
    torch.Tensor.nonzero: _nonzero,
    torch.Tensor.repeat_interleave: _repeat_interleave,
    torch.argwhere: _nonzero,
    torch.bincount: _bincount,
    torch.masked_select: _masked_select,
    torch.nn.functional.one_hot: _one_hot,
    torch.nonzero: _nonzero,
    torch.repeat_interleave: _repeat_interleave,
    torch.where: _where,
}


class Sized(TorchFunctionMode):
    """Replaces the operators in the table above while a function is captured with its questions answered."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling() or func not in _SIZED:
            return func(*args, **(kwargs or {}))
        return _SIZED[func](*args, **(kwargs or {}))
