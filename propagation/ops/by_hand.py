"""Collectives that people write by hand (`partway.ops`), on the tensors of each rank.

    all_reduce(x, op, axes, size)                   x of all ranks, reduced by "sum", "mean", "max", "min" or "prod"
    all_gather(x, dim, axes, sizes)                 x of all ranks, put together along `dim`
    reduce_scatter(x, op, dim, axes, sizes, own)    this rank's slice, of `own` elements along `dim`, of the reduction
    broadcast(x, root, axes, size)                  x of the rank at the position `root`
    reduce(x, root, axes, size)                     the sum at the position `root`, zeros elsewhere
    all_to_all(x, split_dim, concat_dim, axes, sends, receives, own)
                                                    a piece of every rank's x, put together along `concat_dim`. This
                                                    rank sends pieces of the sizes `sends` along `split_dim`, and gets
                                                    those of the sizes `receives` along `concat_dim`; `own` is its
                                                    resulting size along `split_dim`, if that is another dim
    permute(x, pairs, axes, size)                   x of another rank; zeros where none sends. `pairs`: source, target,
                                                    source, target, ...
    send_receive(xs, targets, sources, sizes, ndims, dtype, device, axes, size)
                                                    one tensor from each of `sources`; xs[i] goes to targets[i]. `sizes`
                                                    has the sizes of the received tensors one after another, `ndims` the
                                                    number of dims of each

Ranks are positions along `axes`, major to minor in the order of the mesh; `size` is their number, `sizes` has the size
of each rank's part along `dim`.

Each is a linear map from the tensors of all ranks to those of all ranks, and its derivative is the transpose of that
map, as the differentiated objective is the sum of those of all ranks. So the gradient of a sum is the sum of all ranks'
gradients. Other reductions are not linear; to be differentiated, they are written as a reduction of the gathered tensor
(`partway.ops`).

All are symbols: lowering writes a manual function as conversions (`propagation/manual/`), and outside of one the
processes of a launcher run them (`runtime/`). None is dropped if its result is unread, since other ranks wait in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ...strategy.errors import StrategyError
from .registration import define

REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "mean": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "prod": lambda stack: stack.prod(0, dtype=stack.dtype),
}  # of the stacked operands of all ranks


def _sized(x: Tensor, sizes: dict[int, int]) -> Tensor:
    """An empty tensor like `x`, with other sizes of some dims."""
    return x.new_empty([sizes.get(dim, extent) for dim, extent in enumerate(x.shape)])


def _fake_same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_all_gather(x: Tensor, dim: int, axes: list[str], sizes: list[int]) -> Tensor:
    return _sized(x, {dim: sum(sizes)})


def _fake_reduce_scatter(x: Tensor, op: str, dim: int, axes: list[str], sizes: list[int], own: int) -> Tensor:
    return _sized(x, {dim: own})


def _fake_all_to_all(
    x: Tensor, split_dim: int, concat_dim: int, axes: list[str], sends: list[int], receives: list[int], own: int
) -> Tensor:
    return _sized(x, {split_dim: own, concat_dim: sum(receives)})


def _fake_send_receive(
    xs: list[Tensor], targets: list[int], sources: list[int], sizes: list[int], ndims: list[int], dtype: torch.dtype,
    device: torch.device, axes: list[str], size: int,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes_of(sizes, ndims)]


def shapes_of(sizes: Sequence[int], ndims: Sequence[int]) -> list[list[int]]:
    """Split `sizes`, the concatenation of several shapes, into shapes with `ndims` dims."""
    rest = iter(sizes)
    return [list(itertools.islice(rest, count)) for count in ndims]


# -- Transposes


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.x, ctx.rest = inputs[0].shape, inputs[1:]


def _check_linear(op: str) -> None:
    if op not in ("sum", "mean"):
        raise StrategyError(f"a {op} over ranks is not linear and has no transpose; call partway.ops, which gathers it")


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _check_linear(ctx.rest[0])
    return all_reduce(grad, *ctx.rest), None, None, None


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dim, axes, sizes = ctx.rest
    return reduce_scatter(grad, "sum", dim, axes, sizes, ctx.x[dim]), None, None, None


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    op, dim, axes, sizes, _ = ctx.rest
    _check_linear(op)
    gathered = all_gather(grad, dim, axes, sizes)
    return gathered / len(sizes) if op == "mean" else gathered, None, None, None, None, None


def _broadcast_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return reduce(grad, *ctx.rest), None, None, None


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return broadcast(grad, *ctx.rest), None, None, None


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    split_dim, concat_dim, axes, sends, receives, _ = ctx.rest
    back = all_to_all(grad, concat_dim, split_dim, axes, receives, sends, ctx.x[concat_dim])
    return back, None, None, None, None, None, None


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    pairs, axes, size = ctx.rest
    turned = [end for pair in zip(pairs[1::2], pairs[::2], strict=True) for end in pair]
    return permute(grad, turned, axes, size), None, None, None


def _keep_messages(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, ctx.targets, ctx.sources, _, _, ctx.dtype, ctx.device, ctx.axes, ctx.size = inputs
    ctx.shapes = [list(x.shape) for x in xs]


def _send_receive_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    sizes, ndims = [n for shape in ctx.shapes for n in shape], [len(shape) for shape in ctx.shapes]
    back = send_receive(grads, ctx.sources, ctx.targets, sizes, ndims, ctx.dtype, ctx.device, ctx.axes, ctx.size)
    return back, *[None] * 8


# -- The operators

all_reduce = define(
    "all_reduce(Tensor x, str op, str[] axes, int size) -> Tensor",
    fake=_fake_same,
    backward=_all_reduce_backward,
    keep=_keep,
)
all_gather = define(
    "all_gather(Tensor x, int dim, str[] axes, int[] sizes) -> Tensor",
    fake=_fake_all_gather,
    backward=_all_gather_backward,
    keep=_keep,
)
reduce_scatter = define(
    "reduce_scatter(Tensor x, str op, int dim, str[] axes, int[] sizes, int own) -> Tensor",
    fake=_fake_reduce_scatter,
    backward=_reduce_scatter_backward,
    keep=_keep,
)
broadcast = define(
    "broadcast(Tensor x, int root, str[] axes, int size) -> Tensor",
    fake=_fake_same,
    backward=_broadcast_backward,
    keep=_keep,
)
reduce = define(
    "reduce(Tensor x, int root, str[] axes, int size) -> Tensor", fake=_fake_same, backward=_reduce_backward, keep=_keep
)
all_to_all = define(
    "all_to_all(Tensor x, int split_dim, int concat_dim, str[] axes, int[] sends, int[] receives, int own) -> Tensor",
    fake=_fake_all_to_all,
    backward=_all_to_all_backward,
    keep=_keep,
)
permute = define(
    "permute(Tensor x, int[] pairs, str[] axes, int size) -> Tensor",
    fake=_fake_same,
    backward=_permute_backward,
    keep=_keep,
)
send_receive = define(
    "send_receive(Tensor[] xs, int[] targets, int[] sources, int[] sizes, int[] ndims, ScalarType dtype, "
    "Device device, str[] axes, int size) -> Tensor[]",
    fake=_fake_send_receive,
    backward=_send_receive_backward,
    keep=_keep_messages,
)

COLLECTIVES = frozenset({all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, permute, send_receive})

for _operator in COLLECTIVES:
    has_side_effect(_operator)
