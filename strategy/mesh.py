"""The device mesh: named axes with sizes, ranks numbered row-major (the last axis varies fastest)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .errors import StrategyError, shown

MOST_DEVICES = 2**24  # more than any cluster has: a larger number is a mistake, and some figures would overflow


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes and their sizes, outermost first: `Mesh({"dp": 2, "tp": 4})` has 8 devices.

    Rank r is at the row-major coordinate of r, so the last axis joins neighbouring ranks. On a mesh that is a part of a
    job, `Mesh({"tp": 2}, ranks=(4, 5))`, rank r of the mesh is the process `ranks[r]` of the job.

    Raises StrategyError for no axes, an empty or repeated name, a size below 1, or any other number of ranks than one
    for each device.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: Sequence[int]  # the job's rank for each rank of the mesh; a range where the mesh is the whole job

    def __init__(self, axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> None:
        if not isinstance(axes, Mapping) or not axes:
            raise StrategyError(
                f'Mesh takes a dict of axis names and sizes, such as {{"dp": 2, "tp": 4}}, not {shown(axes)}'
            )
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise StrategyError(f"mesh axis name {shown(name)} must be an identifier, such as 'dp'")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise StrategyError(f"mesh axis {name!r} has size {shown(size)}; a size is an int of 1 or more")
        if math.prod(axes.values()) > MOST_DEVICES:
            raise StrategyError(f"a mesh of sizes {shown(tuple(axes.values()))} has more than {MOST_DEVICES:,} devices")
        object.__setattr__(self, "axes", tuple(axes))
        object.__setattr__(self, "sizes", tuple(axes.values()))
        object.__setattr__(self, "ranks", range(self.device_num))
        if ranks is not None:
            object.__setattr__(self, "ranks", self._checked(ranks))

    def _checked(self, ranks: Sequence[int]) -> tuple[int, ...]:
        given = ranks if isinstance(ranks, list | tuple | range) else ()
        counted = {rank for rank in given if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0}
        if len(given) != self.device_num or list(given) != sorted(counted):  # as process groups have their ranks
            raise StrategyError(
                f"the mesh {self} has {self.device_num} devices, and its ranks are {shown(ranks)}; name as many ranks "
                "of the job, each once, in ascending order"
            )
        return tuple(given)

    @classmethod
    def flat(cls, device_num: int) -> Mesh:
        """The finest mesh of `device_num` devices: one axis d0, d1, ... for each prime factor, so that
        every split of a dim into a divisor of `device_num` parts can be written (8 is 2x2x2, 12 is 2x2x3).
        """
        if not isinstance(device_num, int) or isinstance(device_num, bool) or device_num < 1:
            raise StrategyError(f"device_num is {shown(device_num)}; it must be an int of 1 or more")
        if device_num > MOST_DEVICES:
            raise StrategyError(f"device_num is {shown(device_num)}, more than {MOST_DEVICES:,} devices")
        return cls.of_sizes(_prime_factors(device_num) or (1,))

    @classmethod
    def of_sizes(cls, sizes: tuple[int, ...]) -> Mesh:
        """A mesh with axes d0, d1, ... of the given sizes."""
        if not isinstance(sizes, tuple | list):
            raise StrategyError(f"of_sizes takes a tuple of sizes, such as (2, 4), not {shown(sizes)}")
        return cls({f"d{i}": size for i, size in enumerate(sizes)})

    @cached_property
    def device_num(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """The number of ranks in a group along `axes`: the product of their sizes. Raises StrategyError for an unknown
        axis, naming those of the mesh."""
        return math.prod(self.sizes[self.index(axis)] for axis in axes)

    def index(self, axis: str) -> int:
        """The position of the axis named `axis`. Raises StrategyError for an unknown one, naming those of the mesh."""
        if not isinstance(axis, str) or axis not in self.axes:
            raise StrategyError(f"the mesh has no axis {shown(axis)}; its axes are {self}")
        return self.axes.index(axis)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The place of `rank` on each axis."""
        if not isinstance(rank, int) or not 0 <= rank < self.device_num:
            raise StrategyError(
                f"rank {shown(rank)} is not on the mesh {self}; its ranks are 0 to {self.device_num - 1}"
            )
        coordinate = []
        for size in reversed(self.sizes):
            rank, position = divmod(rank, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """The rank at `coordinate`. Raises StrategyError unless it has a place on each axis."""
        rank = 0
        try:
            for position, size in zip(coordinate, self.sizes, strict=True):
                if not 0 <= position < size:
                    raise ValueError
                rank = rank * size + position
        except (TypeError, ValueError):
            where = f"{shown(coordinate)} is not a coordinate on the mesh {self}"
            raise StrategyError(f"{where}; write a place on each axis") from None
        return rank

    @property
    def is_part(self) -> bool:
        """Whether it names ranks of a job, which may have others."""
        return not isinstance(self.ranks, range)

    def own_rank(self, process: int) -> int:
        """The rank on the mesh of the job's rank `process`. Raises StrategyError if the mesh lacks it."""
        if process not in self.ranks:
            raise StrategyError(
                f"rank {shown(process)} of the job is not on the mesh {self}; let only its ranks make this call"
            )
        return self.ranks.index(process)

    def processes(self, process: int, *axes: str) -> tuple[int, ...]:
        """As `group`, in ranks of the job."""
        return tuple(self.ranks[rank] for rank in self.group(self.own_rank(process), *axes))

    def stride(self, axis: str) -> int:
        """The distance between neighbouring ranks of a group along `axis`."""
        return math.prod(self.sizes[self.index(axis) + 1 :])

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in order, `rank` among them.

        Their order is row-major in `axes`, as a dim that several axes split is cut. Raises StrategyError unless
        `axes` are axes of this mesh in its order, each once.
        """
        coordinate, ranks = self.coordinate(rank), [rank]
        for index in self._indices(axes):
            stride = self.stride(self.axes[index])
            firsts = [r - coordinate[index] * stride for r in ranks]
            ranks = [first + i * stride for first in firsts for i in range(self.sizes[index])]
        return tuple(ranks)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`, in the order of their first ranks. Raises StrategyError as `group` does."""
        firsts = [rank for rank in range(self.device_num) if self.position(rank, *axes) == 0]
        return tuple(self.group(rank, *axes) for rank in firsts)

    def position(self, rank: int, *axes: str) -> int:
        """The place of `rank` in its group along `axes`. Raises StrategyError as `group` does."""
        coordinate, position = self.coordinate(rank), 0
        for index in self._indices(axes):
            position = position * self.sizes[index] + coordinate[index]
        return position

    def _indices(self, axes: tuple[str, ...]) -> list[int]:
        """The positions of `axes`. Raises StrategyError unless they are in the order of the mesh, each once."""
        indices = [self.index(axis) for axis in axes]
        ordered = sorted(set(indices))
        if indices != ordered:
            raise StrategyError(
                f"the axes {', '.join(axes)} of a group are not in the order of the mesh {self}, each once; write "
                f"{', '.join(self.axes[index] for index in ordered)}"
            )
        return indices

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))
        return f"{sizes} on ranks {', '.join(map(str, self.ranks))}" if self.is_part else sizes

    def __repr__(self) -> str:
        ranks = f", ranks={self.ranks!r}" if self.is_part else ""
        return f"Mesh({dict(zip(self.axes, self.sizes, strict=True))!r}{ranks})"


def _prime_factors(n: int) -> tuple[int, ...]:
    factors, divisor = [], 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return (*factors, n) if n > 1 else tuple(factors)
