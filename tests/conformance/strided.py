"""Samples of operators with operands whose strides are not contiguous.

The inputs of a sharded function are copied into new memory, so a strided operand has to be created inside. `strided`
makes calls whose arguments are contiguous stored tensors, of which the operator gets views. The incoming gradient is
strided if the output is viewed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partway.propagation.graph.structure import flatten


@dataclass(frozen=True)
class View:
    """A way to view a stored tensor: how the tensor is stored, the view, and the tensors for which this is possible."""

    name: str
    store: Callable[[Tensor], Tensor]
    view: Callable[[Tensor], Tensor]
    fits: Callable[[Tensor], bool]


def reversed_dims(x: Tensor) -> Tensor:
    return x.permute(*range(x.dim())[::-1])


def stepped(x: Tensor) -> Tensor:
    return torch.stack((x, torch.zeros_like(x)), -1).flatten(-2)


VIEWS = (
    View("transposed", reversed_dims, reversed_dims, lambda x: x.dim() > 1),
    View("channels_last", lambda x: x.movedim(1, -1), lambda x: x.movedim(-1, 1), lambda x: x.dim() in (4, 5)),
    View("stepped", stepped, lambda x: x[..., ::2], lambda x: x.dim() > 0),
    View("sliced", lambda x: torch.cat((x, x[..., :1]), -1), lambda x: x[..., :-1],
         lambda x: x.dim() > 1 and x.shape[-1] > 0),
)  # fmt: skip


def expanded(x: Tensor) -> View:
    """A tensor expanded along its first dim, so that its numbers change; not for operators that invert matrices."""
    size = x.shape
    return View("expanded", lambda x: x[:1], lambda x: x.expand(size), lambda x: x.dim() > 2 and x.shape[0] > 1)


def strided(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], number: int
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Two calls with strided operands, of which the second has a transposed gradient too: their names, functions and
    arguments. `number` selects the views, in turn."""
    tensors, structure = flatten((args, kwargs))
    for turn, transposed in ((number, False), (number + 1, True)):
        views = [_chosen(x, turn + i) for i, x in enumerate(tensors)]
        if not any(views) and not transposed:
            continue
        name = ", ".join(view.name if view else "as it is" for view in views)
        stored = tuple(_stored(x, view) for x, view in zip(tensors, views, strict=True))
        call = _call(fn, structure, views, transposed)
        yield f"[{name}{'; gradient transposed' if transposed else ''}]", call, stored


def _chosen(x: Tensor, turn: int) -> View | None:
    if x.layout is not torch.strided:
        return None
    fits = [view for view in (*VIEWS, expanded(x)) if view.fits(x)]
    return fits[turn % len(fits)] if fits else None


def _stored(x: Tensor, view: View | None) -> Tensor:
    kept = view.store(x.detach()) if view else x.detach()
    return kept.clone(memory_format=torch.contiguous_format).requires_grad_(x.requires_grad)


def _call(fn: Callable[..., Any], structure: Any, views: Sequence[View | None], transposed: bool) -> Callable[..., Any]:
    def call(*stored: Tensor) -> list[Tensor]:
        own = [view.view(x) if view else x for view, x in zip(views, stored, strict=True)]
        args, kwargs = structure.build(own)
        outputs = flatten(fn(*args, **kwargs))[0]
        return [reversed_dims(o) if transposed and o.layout is torch.strided and o.dim() > 1 else o for o in outputs]

    return call
