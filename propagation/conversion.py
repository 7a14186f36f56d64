"""The cost of every conversion between two layouts of one tensor, and the cheapest way to do it.

A conversion is a chain of single-axis steps of the placement algebra. A dim that several axes split is cut by
them in mesh order, so a step may put or take away a split of a dim only on the last axis that splits it. All
pairs at once are a shortest-path problem on the grid of layouts; `ConversionTable` relaxes it axis by axis
until nothing improves, which is exact because every step changes one axis only.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..strategy.layout import Layout, layout
from ..strategy.mesh import Mesh
from ..strategy.placement import BROADCAST, REPLICATE, Kind, Partial, Placement, Shard, converts, kind, transpose
from .cost import DeviceProfile, Weights, waiting_seconds, wire_bytes

Floats = NDArray[np.float64]
_STEP = 1e-13  # seconds: of two ways that cost the same the shorter one wins, and no way is a circle


@dataclass(frozen=True, slots=True)
class Step:
    """One single-axis conversion: `axis` goes from `source` to `target`, giving `after`."""

    axis: str
    source: Placement
    target: Placement
    after: Layout


@dataclass(frozen=True)
class ConversionTable:
    """Costs between all layouts of tensors of one shape. `gradient`: the backward of a conversion runs too;
    `partial`: how what the ranks hold under Partial makes the value ("sum" or "max"; None: there is no Partial)."""

    shape: tuple[int, ...]
    itemsize: int
    partial: str | None
    gradient: bool
    mesh: Mesh
    profile: DeviceProfile
    weights: Weights

    @cached_property
    def states(self) -> tuple[Placement, ...]:
        """The placements that one axis may have; a layout is one of them for each axis."""
        dims = [Shard(d) for d, size in enumerate(self.shape) if size > 1]
        return (*dims, REPLICATE, BROADCAST, *([Partial(self.partial)] if self.partial else []))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts, numbered; some do not divide the shape evenly (`valid`)."""
        return tuple(layout(self.mesh, p) for p in itertools.product(self.states, repeat=len(self.mesh.axes)))

    @cached_property
    def index(self) -> dict[Layout, int]:
        return {found: i for i, found in enumerate(self.layouts)}

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        return np.array([found.divides(self.shape) for found in self.layouts])

    def local_bytes(self, found: Layout) -> float:
        """The bytes of one rank's part."""
        split = math.prod(n for p, n in zip(found.placements, self.mesh.sizes, strict=True) if isinstance(p, Shard))
        return math.prod(self.shape) * self.itemsize / split

    @cached_property
    def cost(self) -> Floats:
        """`cost[i, j]`: the weighted cost of layout i becoming layout j, forward and backward; inf: impossible."""
        axes, n = len(self.mesh.axes), len(self.states)
        grid = (n,) * axes
        best = np.full((n**axes, *grid), np.inf)
        best.reshape(n**axes, n**axes)[np.diag_indices(n**axes)] = 0.0
        best[:, ~self.valid.reshape(grid)] = np.inf
        while True:
            before = best
            for axis, step in enumerate(self._steps):
                moved = np.moveaxis(best, axis + 1, -1)
                relaxed = np.min(moved[..., :, None] + step[None], axis=-2)
                best = np.moveaxis(np.minimum(moved, relaxed), -1, axis + 1)
            if np.array_equal(best, before):
                break
        best = best.reshape(n**axes, n**axes).copy()
        best[~self.valid] = np.inf
        return best

    @cached_property
    def _steps(self) -> tuple[Floats, ...]:
        """For each axis the costs [states of the other axes..., from, to] of one step on it."""
        found = []
        sizes, n = self.mesh.sizes, len(self.states)
        sharded = np.array([isinstance(p, Shard) for p in self.states])
        for axis, size in enumerate(sizes):
            fixed, linear = self._step_coefficients(size)
            others = [a for a in range(len(sizes)) if a != axis]
            split = np.ones((n,) * len(others))
            taken = np.zeros((*split.shape, n), dtype=bool)  # is the dim of this state split by a later axis?
            for position, other in enumerate(others):
                along = [1] * len(others)
                along[position] = n
                split = split * np.where(sharded, sizes[other], 1).reshape(along)
                if other > axis:
                    same = np.diag(sharded)
                    taken |= same.reshape((*along, n))
            whole = math.prod(self.shape) * self.itemsize / split
            cost = fixed + linear * whole[..., None, None]
            blocked = taken[..., :, None] | taken[..., None, :]
            blocked &= ~np.eye(n, dtype=bool)
            cost = np.where(blocked, np.inf, cost)
            target_valid = np.moveaxis(self.valid.reshape((n,) * len(sizes)), axis, -1)
            cost = np.where(target_valid[..., None, :] | np.eye(n, dtype=bool), cost, np.inf)
            found.append(cost)
        return tuple(found)

    def _step_coefficients(self, size: int) -> tuple[Floats, Floats]:
        """A step costs `fixed + linear * bytes of the value, whole along this axis`."""
        n = len(self.states)
        fixed, linear = np.full((n, n), _STEP), np.zeros((n, n))
        np.fill_diagonal(fixed, 0.0)
        for (i, source), (j, target) in itertools.product(enumerate(self.states), repeat=2):
            if i == j:
                continue
            if not converts(source, target):
                fixed[i, j] = np.inf
                continue
            ways = [kind(source, target)] + ([kind(*transpose(source, target))] if self.gradient else [])
            for way in ways:
                share = 1 / size if way is Kind.ALL_TO_ALL else 1.0
                fixed[i, j] += self.weights.latency * waiting_seconds(way, size, self.profile)
                linear[i, j] += self.weights.wire * wire_bytes(way, share, size) / self.profile.link_bandwidth
                if way in (Kind.PAD, Kind.KEEP):
                    linear[i, j] += self.weights.compute / self.profile.memory_bandwidth
        return fixed, linear

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest chain of steps from `source` to `target`."""
        chain: list[Step] = []
        here, goal = self.index[source], self.index[target]
        n, axes = len(self.states), len(self.mesh.axes)
        while here != goal:
            position = np.unravel_index(here, (n,) * axes)
            options = []
            for axis in range(axes):
                others = tuple(p for a, p in enumerate(position) if a != axis)
                for state in range(n):
                    if state == position[axis]:
                        continue
                    there = int(np.ravel_multi_index((*position[:axis], state, *position[axis + 1 :]), (n,) * axes))
                    options.append(
                        (
                            self._steps[axis][(*others, position[axis], state)] + self.cost[there, goal],
                            axis,
                            state,
                            there,
                        )
                    )
            _, axis, state, here = min(options)
            chain.append(
                Step(self.mesh.axes[axis], self.states[position[axis]], self.states[state], self.layouts[here])
            )
        return tuple(chain)


@lru_cache(maxsize=4096)
def conversion_table(
    shape: tuple[int, ...],
    itemsize: int,
    partial: str | None,
    gradient: bool,
    mesh: Mesh,
    profile: DeviceProfile,
    weights: Weights,
) -> ConversionTable:
    """The shared table for these arguments."""
    return ConversionTable(shape, itemsize, partial, gradient, mesh, profile, weights)
