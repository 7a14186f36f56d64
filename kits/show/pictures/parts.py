"""The parts of a tensor on a mesh, and the devices that hold each: the content of pictures of a layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from partway.strategy import PARTIAL_MAX, Layout, Partial, Shard, Span, StrategyError

_MOST_GROUPS = 4  # groups in a text, of devices with the same addends


@dataclass(frozen=True)
class Panel:
    """One grid of parts: `at` gives the elements of the dims that are neither its rows nor its columns."""

    at: tuple[tuple[int, Span], ...]
    devices: tuple[tuple[tuple[int, ...], ...], ...]  # [row][column]: the devices of this part


@dataclass(frozen=True)
class LayoutParts:
    """A tensor of `shape` under `layout`.

    devices    the numbers of the devices of its mesh
    chunked    it is cut like a DTensor, which differs if several axes cut one dim unevenly
    """

    layout: Layout
    shape: tuple[int, ...]
    devices: tuple[int, ...]
    chunked: bool = False

    @cached_property
    def places(self) -> dict[int, int]:
        """The position in the mesh of each device, by its number."""
        return {device: place for place, device in enumerate(self.devices)}

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims that are cut."""
        return tuple(dim for dim, count in enumerate(self.layout.splits(len(self.shape))) if count > 1)

    @cached_property
    def axes(self) -> tuple[int | None, int | None]:
        """The dims of a grid's rows and columns: for a matrix its own, else the first that are cut; None if there are
        too few."""
        if len(self.shape) == 2:
            return 0, 1
        found = [*self.cut_dims[:2], *(dim for dim in range(len(self.shape)) if dim not in self.cut_dims)][:2]
        if len(found) == 2:
            row, column = sorted(found)
            return row, column
        return (None, found[0]) if found else (None, None)

    def spans(self, dim: int | None) -> tuple[Span, ...]:
        """The slices of a dim that are not empty."""
        if dim is None:
            return ((0, 1),)
        return tuple(dict.fromkeys(span for span in self._cut(dim) if span[0] < span[1]))

    def _cut(self, dim: int) -> tuple[Span, ...]:
        """The slices of a dim, by position among the devices that cut it."""
        cut = self.layout.cut(dim, self.shape[dim])
        return cut.chunks if self.chunked else cut.spans

    @cached_property
    def held(self) -> tuple[tuple[Span, ...], ...]:
        """The elements that each device holds, in the order of the mesh: a slice of every dim."""
        sizes, placements = self.layout.mesh.sizes, self.layout.placements
        coordinates = np.indices(sizes).reshape(len(sizes), -1)  # all at once: there may be tens of thousands
        own = []
        for dim in range(len(self.shape)):
            by = [i for i, placement in enumerate(placements) if placement == Shard(dim)]
            at: Any = np.ravel_multi_index(tuple(coordinates[by]), [sizes[i] for i in by]) if by else coordinates[0] * 0
            cut = self._cut(dim)
            own.append([cut[position] for position in at])
        return tuple(zip(*own, strict=True)) if own else ((),) * len(self.devices)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The largest number of elements on a device, along every dim."""
        return tuple(max(stop - start for start, stop in self._cut(dim)) for dim in range(len(self.shape)))

    @cached_property
    def even(self) -> bool:
        """Whether every device holds the same number of elements."""
        return self.layout.divides(self.shape)

    @cached_property
    def by_slices(self) -> dict[tuple[Span, ...], tuple[int, ...]]:
        """The devices that hold each part, by its slices."""
        found: dict[tuple[Span, ...], list[int]] = {}
        for device, spans in zip(self.devices, self.held, strict=True):
            found.setdefault(spans, []).append(device)
        return {spans: tuple(devices) for spans, devices in found.items()}

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """The devices that hold no element of a tensor that has some."""
        empty = [devices for spans, devices in self.by_slices.items() if any(start >= stop for start, stop in spans)]
        return tuple(sorted(itertools.chain(*empty))) if 0 not in self.shape else ()

    def panels(self) -> Iterator[Panel]:
        """The grids of all parts."""
        row, column = self.axes
        others = [dim for dim in self.cut_dims if dim not in (row, column)]
        for chosen in itertools.product(*(self.spans(dim) for dim in others)):
            at = tuple(zip(others, chosen, strict=True))
            yield Panel(at, tuple(tuple(self._held(at, r, c) for c in self.spans(column)) for r in self.spans(row)))

    def _held(self, at: Sequence[tuple[int, Span]], row: Span, column: Span) -> tuple[int, ...]:
        whole = [(0, size) for size in self.shape]
        for dim, span in (*at, (self.axes[0], row), (self.axes[1], column)):
            if dim is not None:
                whole[dim] = span
        return self.by_slices[tuple(whole)]

    def words(self, devices: Sequence[int]) -> str:
        """These devices' shares of a part: "0–3" the same, "Σ(0, 1) = Σ(2, 3)" addends of it, twice."""
        mesh, placements = self.layout.mesh, self.layout.placements
        if not self.layout.adds:
            return listed(devices)
        groups: dict[tuple[int, ...], list[int]] = {}
        for device in devices:
            coordinate = mesh.coordinate(self.places[device])
            key = tuple(c for c, p in zip(coordinate, placements, strict=True) if not isinstance(p, Partial))
            groups.setdefault(key, []).append(device)
        of = "max" if PARTIAL_MAX in placements else "Σ"
        texts = [f"{of}({listed(group)})" for group in groups.values()]
        return " = ".join(texts if len(texts) <= _MOST_GROUPS else [*texts[: _MOST_GROUPS - 1], "…"])

    def meanings(self) -> Iterator[str]:
        """The effect of each axis of the mesh on the tensor."""
        mesh = self.layout.mesh
        for axis, size, placement in zip(mesh.axes, mesh.sizes, self.layout.placements, strict=True):
            if isinstance(placement, Shard):
                dim = placement.dim
                uneven = "" if self.layout.cut(dim, self.shape[dim]).even else ", whose slices are not all full"
                yield f"{axis} ({size}) cuts dim {dim}{uneven}"
            elif placement == PARTIAL_MAX:
                yield f"{axis} ({size}): each device has candidates; the value is their maximum"
            elif isinstance(placement, Partial):
                yield f"{axis} ({size}): each device has an addend; the value is their sum"
            else:
                yield f"{axis} ({size}): every device has the same"


def parts_of(layout: Layout, shape: Sequence[int], devices: Sequence[int] = (), chunked: bool = False) -> LayoutParts:
    """The parts of a tensor of `shape` under `layout`, on the `devices` of its mesh (those from 0 on). Raises
    StrategyError for a shape that it cannot cut."""
    sizes = tuple(shape)
    layout.local_shape(sizes)  # it checks both
    if 0 in sizes:
        raise StrategyError(f"a tensor of the shape {list(sizes)} has no elements, so there is nothing to draw")
    return LayoutParts(layout, sizes, tuple(devices) or tuple(range(layout.mesh.device_num)), chunked)


def listed(devices: Sequence[int]) -> str:
    """Numbers of devices, consecutive ones abbreviated: "0–3, 8, 9"."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
