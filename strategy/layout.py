"""A tensor's placement on every axis of a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache

from .cut import Cut, Span
from .errors import StrategyError, shown
from .mesh import Mesh
from .placement import BROADCAST, PARTIAL, REPLICATE, Broadcast, Partial, Placement, Replicate, Routed, Shard, dual


@dataclass(frozen=True, slots=True)
class Layout:
    """One placement for each axis of `mesh`, in the order of its axes.

    Where several axes split a dim, the first of them cuts it into the largest pieces (mesh order is major to minor).
    Layouts compare by value; `layout()` returns the one interned object for a value.

    `cuts`: whether it splits a tensor; `adds`: whether ranks hold addends (or candidates). Raises
    StrategyError when the number of placements is not the number of axes.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    cuts: bool = field(init=False, repr=False, compare=False)
    adds: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise StrategyError(f"a layout takes a Mesh, such as Mesh({{'dp': 2, 'tp': 4}}), not {shown(self.mesh)}")
        if not isinstance(self.placements, tuple):
            raise StrategyError(
                f"a layout takes a tuple of placements, one for each axis of ({self.mesh}), not "
                f"{shown(self.placements)}"
            )
        if len(self.placements) != len(self.mesh.axes):
            raise StrategyError(
                f"a layout on the mesh {self.mesh} takes {len(self.mesh.axes)} placements, not {len(self.placements)}"
            )
        for placement in self.placements:
            if not isinstance(placement, Shard | Replicate | Broadcast | Partial | Routed):
                raise StrategyError(
                    f"{shown(placement)} is not a placement; write Shard(dim), Replicate(), Broadcast() or Partial()"
                )
        object.__setattr__(self, "cuts", any(isinstance(placement, Shard) for placement in self.placements))
        object.__setattr__(self, "adds", any(isinstance(placement, Partial) for placement in self.placements))

    @classmethod
    def replicated(cls, mesh: Mesh) -> Layout:
        """The layout in which every rank holds the whole value."""
        return layout(mesh, (REPLICATE,) * len(mesh.axes))

    def splits(self, ndim: int) -> tuple[int, ...]:
        """The number of parts into which each of `ndim` dims is split."""
        parts = [1] * ndim
        for placement, size in zip(self.placements, self.mesh.sizes, strict=True):
            if isinstance(placement, Shard) and placement.dim < ndim:
                parts[placement.dim] *= size
        return tuple(parts)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, major first."""
        return tuple(self.mesh.axes[i] for i in self._splitting(dim))

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split any dim."""
        return tuple(a for a, p in zip(self.mesh.axes, self.placements, strict=True) if isinstance(p, Shard))

    def cut(self, dim: int, size: int) -> Cut:
        """The cut of `dim`, of `size`; its slices are in the order of the group of all axes that split the dim."""
        return Cut(size, tuple(self.mesh.sizes[i] for i in self._splitting(dim)))

    def _splitting(self, dim: int) -> list[int]:
        """The positions of the axes that split `dim`."""
        return [i for i, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim]

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Whether every split dim exists in `shape` and is divided evenly."""
        return self._has_dims(shape) and all(
            size % parts == 0 for size, parts in zip(shape, self.splits(len(shape)), strict=True)
        )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether every split dim exists in `shape` and has elements to split. Some parts may be empty."""
        return self._has_dims(shape) and all(
            parts == 1 or size > 1 for size, parts in zip(shape, self.splits(len(shape)), strict=True)
        )

    def chunks(self, shape: tuple[int, ...]) -> bool:
        """Whether a DTensor of `shape` is cut the same (`Cut.chunked`); the layout has to fit `shape`."""
        return self.divides(shape) or all(self.cut(dim, size).chunked for dim, size in enumerate(shape))

    def _has_dims(self, shape: tuple[int, ...]) -> bool:
        return all(p.dim < len(shape) for p in self.placements if isinstance(p, Shard))

    def local_shape(self, shape: tuple[int, ...], more: int = 0, load: float = 1.0) -> tuple[int, ...]:
        """The shape of one rank's part of a tensor of global `shape`, the same for all ranks; uneven slices have
        `Cut.width`, and dims of `unsized_dims` their `expected_rows`. Raises StrategyError for a split dim that `shape`
        lacks."""
        self._check(shape)
        local, experts = list(shape), dict[int, int]()
        for placement, count in zip(self.placements, self.mesh.sizes, strict=True):
            if isinstance(placement, Shard | Routed) and placement.dim is not None:
                if isinstance(placement, Routed) and placement.by == "expert":
                    experts[placement.dim] = experts.get(placement.dim, 1) * count
                else:
                    local[placement.dim] = -(-local[placement.dim] // count)
        for dim, parts in experts.items():
            local[dim] = expected_rows(local[dim], parts, more, load)
        return tuple(local)

    @property
    def unsized_dims(self) -> tuple[int, ...]:
        """The dims of which a rank's size is known only at run time."""
        routed = (p for p in self.placements if isinstance(p, Routed) and p.by == "expert")
        return tuple({p.dim for p in routed if p.dim is not None})

    def global_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor whose full parts, one on each rank, have the shape `local`."""
        return tuple(size * parts for size, parts in zip(local, self.splits(len(local)), strict=True))

    def slices(self, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
        """The part of a tensor of global `shape` that `rank` holds. Raises StrategyError as `local_shape` does."""
        return _slices(self, shape, rank)

    def _check(self, shape: tuple[int, ...]) -> None:
        if not isinstance(shape, tuple | list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise StrategyError(f"{shown(shape)} is not a shape; write a tuple of sizes of 0 or more")
        missing = [p.dim for p in self.placements if isinstance(p, Shard) and p.dim >= len(shape)]
        if missing:
            raise StrategyError(f"the layout {self} splits dim {missing[0]}, which the shape {list(shape)} lacks")

    def dual(self) -> Layout:
        """The layout of the gradient of a value laid out like this."""
        return layout(self.mesh, tuple(map(dual, self.placements)))

    def replaced(self, axis: int, placement: Placement) -> Layout:
        """This layout with another placement on the axis at position `axis`."""
        return layout(self.mesh, (*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def whole_along(self, dims: Collection[int]) -> Layout:
        """This layout without the splits of `dims`."""
        splits = (isinstance(p, Shard) and p.dim in dims for p in self.placements)
        pairs = zip(self.placements, splits, strict=True)
        return layout(self.mesh, tuple(REPLICATE if split else p for p, split in pairs)) if dims else self

    def without_single(self, shape: tuple[int, ...]) -> Layout:
        """This layout without the splits of dims that have one element."""
        return self.whole_along({dim for dim, size in enumerate(shape) if size == 1})

    def with_broadcasts(self) -> tuple[Layout, ...]:
        """This layout, then those with Broadcast for some of its Replicate: ranks hold the same values, and only the
        layout of the gradient differs."""
        choices = [(REPLICATE, BROADCAST) if p == REPLICATE else (p,) for p in self.placements]
        return tuple(layout(self.mesh, chosen) for chosen in itertools.product(*choices))

    def __str__(self) -> str:
        return "[" + " ".join([f"{a}:{p}" for a, p in zip(self.mesh.axes, self.placements, strict=True)]) + "]"


def expected_rows(rows: int, parts: int, more: int = 0, load: float = 1.0) -> int:
    """The rows that a rank is expected to hold of `rows` that are sorted by expert, with the experts in `parts`, and
    `more`. `load`: the rows of the rank that has most, over the mean of all."""
    return max(math.ceil(rows * min(load, parts) / parts), 2) + more  # one row would be taken for a dim that broadcasts


@lru_cache(maxsize=65536)
def _slices(of: Layout, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    slices = [slice(0, size) for size in shape]
    for dim, axes, spans in _split_dims(of, shape):
        slices[dim] = slice(*spans[of.mesh.position(rank, *axes)])
    return tuple(slices)


@lru_cache(maxsize=65536)
def _split_dims(of: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, tuple[str, ...], tuple[Span, ...]], ...]:
    """Each dim that is split, with the axes that split it and the slices of their ranks."""
    of._check(shape)
    split = ((dim, of.axes_of(dim)) for dim in range(len(shape)))
    return tuple((dim, axes, of.cut(dim, shape[dim]).spans) for dim, axes in split if axes)


@lru_cache(maxsize=2**20)
def layout(mesh: Mesh, placements: tuple[Placement, ...]) -> Layout:
    """The interned Layout with these placements."""
    return Layout(mesh, placements)


__all__ = ["BROADCAST", "PARTIAL", "REPLICATE", "Layout", "layout"]
