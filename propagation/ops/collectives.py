"""The operators by which a program communicates: `convert` and, after fusion, `convert_group`.

`partway::convert(x, source, target, axes, size, tag)` turns a rank's part of a tensor under the placement `source` on
each of `axes` into its part under `target` on each (`strategy/placement.py` has the collective or local step). Several
axes, in the order of the mesh, act as one axis of `size` ranks, the product of their sizes. `tag` is the position of
the conversion in the program's list, which holds its reason. The result of a conversion that moves data is contiguous,
whatever the strides of its operand. Both operators are symbols: they have shapes and a derivative, and the executors of
`runtime/` run them; calling one outside an executor is an error.

`partway::constrain(x, strategy, name)` is x with a user's constraint at this place of the model. `strategy` is the JSON
text of `constraint_text`; planning reads it, and lowering removes the call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...strategy.cut import SliceWindow
from ...strategy.placement import Kind, Shard, adjoint, kind, placement_from_code
from .registration import define


def converted_shape(shape: tuple[int, ...], source: str, target: str, size: int) -> tuple[int, ...]:
    """The local shape after converting a local `shape` among `size` ranks."""
    out = list(shape)
    before, after = placement_from_code(source), placement_from_code(target)
    match before, after:
        case Shard(), SliceWindow():
            out[after.dim] = after.width
        case SliceWindow(), _:
            out[before.dim] = before.cut.width
        case _:
            if isinstance(before, Shard):
                out[before.dim] = before.cut.size if before.cut else out[before.dim] * size
            if isinstance(after, Shard):
                out[after.dim] = after.cut.width if after.cut else out[after.dim] // size
    return tuple(out)


@lru_cache(maxsize=4096)
def kind_of(source: str, target: str) -> Kind:
    """The kind of the conversion between two placement codes."""
    return kind(placement_from_code(source), placement_from_code(target))


def _fake_convert(x: Tensor, source: str, target: str, axes: list[str], size: int, tag: int) -> Tensor:
    if kind_of(source, target) is Kind.NOTHING:  # the result is the operand
        return x.new_empty_strided(x.shape, x.stride())
    return x.new_empty(converted_shape(tuple(x.shape), source, target, size))


def _fake_group(
    xs: list[Tensor], source: str, target: str, axes: list[str], size: int, tags: list[int]
) -> list[Tensor]:
    return [x.new_empty(converted_shape(tuple(x.shape), source, target, size)) for x in xs]


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, source, target, ctx.axes, ctx.size, ctx.tag = inputs
    ctx.back = adjoint(placement_from_code(target)), adjoint(placement_from_code(source))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    source, target = ctx.back
    if source != target:
        grad = convert(grad, str(source), str(target), ctx.axes, ctx.size, ctx.tag)
    return grad, None, None, None, None, None


def _fake_constrain(x: Tensor, strategy: str, name: str) -> Tensor:
    return torch.empty_like(x)


# -- The operators

convert = define(
    "convert(Tensor x, str source, str target, str[] axes, int size, int tag) -> Tensor",
    fake=_fake_convert,
    backward=_backward,
    keep=_keep_context,
)
convert_group = define(
    "convert_group(Tensor[] xs, str source, str target, str[] axes, int size, int[] tags) -> Tensor[]", fake=_fake_group
)
constrain = define(
    "constrain(Tensor x, str strategy, str name) -> Tensor",
    fake=_fake_constrain,
    backward=lambda ctx, grad: (grad, None, None),
)
