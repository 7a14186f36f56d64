"""Inputs of which each rank is given its own part, as by a data loader with a DistributedSampler.

A plan cuts a dim in Partway's way, and ranks may hold other slices, as in a short last batch: then the parts are joined
and cut again. The parts of the others have to be known before a program is chosen, so every call asks whether a rank
has parts of other shapes than before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...propagation.torch_internals import is_batched
from ...strategy.errors import RuntimeStateError
from ...strategy.layout import Layout
from ...strategy.torch_mesh import own_rank
from ..code.slices import full_part
from ..executors.execute import process_group
from ..executors.issue import all_gather, as_bytes
from ..ranks.watch import failed_in
from ..torch_internals import timeout_of
from .batched import one_by_one

Place = tuple[slice, ...]


@dataclass(frozen=True)
class Parts:
    """The `shapes` of the parts of one tensor, by rank, and their checksums if they were asked for."""

    shapes: tuple[tuple[int, ...], ...]
    contents: tuple[str, ...] = field(default=(), compare=False)

    def places(self, layout: Layout) -> list[Place]:
        """The place of each rank's part in the whole, given the `layout` that says which slices a rank holds. Raises
        RuntimeStateError if ranks with the same slice of a dim have other sizes."""
        spans: list[list[slice]] = [[] for _ in self.shapes]
        for dim in range(len(self.shapes[0])):
            axes = layout.axes_of(dim)
            sizes: dict[int, tuple[int, int]] = {}  # by position: the size, and the first rank with it
            positions = [layout.mesh.position(rank, *axes) if axes else 0 for rank in range(len(self.shapes))]
            for rank, (position, shape) in enumerate(zip(positions, self.shapes, strict=True)):
                size, first = sizes.setdefault(position, (shape[dim], rank))
                if size != shape[dim]:
                    raise RuntimeStateError(
                        f"ranks {first} and {rank} share a part, and have {size} and {shape[dim]} elements of dim "
                        f"{dim} ({layout})"
                    )
            starts = {position: sum(sizes[p][0] for p in range(position)) for position in sizes}
            for own, position in zip(spans, positions, strict=True):
                own.append(slice(starts[position], starts[position] + sizes[position][0]))
        return [tuple(own) for own in spans]


def places_of(layout: Layout, shape: tuple[int, ...]) -> list[Place]:
    """The place of each rank's part under `layout` in a tensor of global `shape`."""
    return [layout.slices(shape, rank) for rank in range(layout.mesh.device_num)]


def whole_shape(places: Sequence[Place]) -> tuple[int, ...]:
    """The shape of the whole tensor whose parts are at `places`."""
    return tuple(max(s.stop for s in along) for along in zip(*places, strict=True))


def taken(whole: Tensor, layout: Layout) -> Tensor:
    """This rank's part under `layout` of a tensor that every rank holds; its gradient is gathered from those of all."""
    shape = tuple(whole.shape)
    process_group(layout.mesh, layout.split_axes)  # while all ranks are here
    part: Tensor = _Taken.apply(whole, layout, shape, places_of(layout, shape))  # type: ignore[no-untyped-call]
    return part


def gathered(part: Tensor, layout: Layout, parts: Parts) -> Tensor:
    """The whole tensor of which each rank holds one of `parts`. All ranks use it alike: its gradient is the same on
    all."""
    places = parts.places(layout)
    whole: Tensor = _Gathered.apply(part, layout, whole_shape(places), places)  # type: ignore[no-untyped-call]
    return whole


def recut(
    part: Tensor, layout: Layout, shape: tuple[int, ...], before: Sequence[Place], after: Sequence[Place]
) -> Tensor:
    """This rank's part at its place in `after`, from the parts of all ranks at their places in `before`."""
    result: Tensor = _Recut.apply(part, layout, shape, before, after)  # type: ignore[no-untyped-call]
    return result


def _assembled(part: Tensor, layout: Layout, shape: tuple[int, ...], places: Sequence[Place]) -> Tensor:
    """The tensor of global `shape` of which each rank has a `part`, at its place; `layout` says which axes split it."""
    axes = layout.split_axes
    ranks = layout.mesh.group(own_rank(layout.mesh), *axes)
    sizes = {rank: tuple(s.stop - s.start for s in places[rank]) for rank in ranks}
    longest = tuple(map(max, zip(*sizes.values(), strict=True)))
    own = full_part(part.detach(), longest)
    parts = own.new_empty((len(ranks), *longest))
    all_gather(as_bytes(parts), as_bytes(own), process_group(layout.mesh, axes))
    whole = own.new_empty(shape)
    for rank, held in zip(ranks, parts, strict=True):
        whole[places[rank]] = held[tuple(slice(0, size) for size in sizes[rank])]
    return whole


def _own(whole: Tensor, layout: Layout, places: Sequence[Place]) -> Tensor:
    """The elements at the place of this rank, in memory of their own. (Not padded, since its gradient is not.)"""
    return whole[places[own_rank(layout.mesh)]].clone(memory_format=torch.contiguous_format)


class _Taken(torch.autograd.Function):
    """The elements at this rank's place, of a tensor that every rank holds; differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *where: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.where = where
        return _own(whole, where[0], where[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 4

        def gathered_of(each: Sequence[Tensor | None]) -> list[Tensor]:
            return [_Gathered.apply(one, *ctx.where) for one in each]  # type: ignore[no-untyped-call]

        whole = one_by_one(gathered_of, [gradient]) if is_batched(gradient) else gathered_of([gradient])
        return whole[0], None, None, None


class _Gathered(torch.autograd.Function):
    """The inverse of `_Taken`, and its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, *where: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.where = where
        return _assembled(part, *where)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        part = None if gradient is None else _Taken.apply(gradient, *ctx.where)  # type: ignore[no-untyped-call]
        return part, None, None, None


class _Recut(torch.autograd.Function):
    """Moves parts from the places `before` to the places `after`, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, layout: Layout, shape: tuple[int, ...], before: Sequence[Place], after: Sequence[Place]
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.back = layout, shape, after, before
        return _own(_assembled(part, layout, shape, before), layout, after)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        return (None if gradient is None else recut(gradient, *ctx.back)), None, None, None, None


# -- The parts of other ranks, exchanged between processes without a GPU ----------------------------------------------

_DIMS = 16  # the most dims of a tensor whose shape is exchanged


def any_rank(flag: bool, about: str) -> bool:
    """Whether `flag` is set on any rank; every rank calls it. Raises RuntimeStateError if one does not."""
    told = torch.tensor([flag], dtype=torch.int32)
    try:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=_on_cpus(dist.group.WORLD))
    except RuntimeError as error:
        raise failed_in(about, error) from error
    return bool(told)


def parts_now(part: Tensor, about: str) -> Parts:
    """The parts of a tensor on all ranks, of which this one has `part`; every rank calls it. Raises RuntimeStateError
    if one does not, or has a tensor of another dtype or number of dims."""
    dtypes = sorted(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype))
    own = torch.tensor([dtypes.index(str(part.dtype)), part.dim(), *part.shape, *[0] * (_DIMS - part.dim())])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(every, own, group=_on_cpus(dist.group.WORLD))
    except RuntimeError as error:
        raise failed_in(about, error) from error
    found = [(dtypes[dtype], shape[:dims]) for dtype, dims, *shape in (one.tolist() for one in every)]
    for rank, (dtype, shape) in enumerate(found):
        if (dtype, len(shape)) != (found[0][0], len(found[0][1])):
            raise RuntimeStateError(
                f"{about}: rank 0 has a part of {found[0][0]}{found[0][1]}, and rank {rank} one of {dtype}{shape}; "
                "give tensors of one dtype and number of dims"
            )
    return Parts(tuple(tuple(shape) for _, shape in found))


@functools.lru_cache(maxsize=1)
def _on_cpus(world: Any) -> Any:
    """A group of all ranks that waits for no GPU, created at the first call of all ranks."""
    return dist.new_group(backend="gloo", timeout=timeout_of(world))
