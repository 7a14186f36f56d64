"""The device mesh: named axes with sizes, ranks numbered row-major (the last axis varies fastest)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .errors import StrategyError


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes and their sizes, outermost first: `Mesh({"dp": 2, "tp": 4})` has 8 devices.

    Rank r stands at the row-major coordinate of r, so the last axis joins neighbouring ranks.

    Raises StrategyError for no axes, an empty or repeated name, or a size below 1.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        if not isinstance(axes, Mapping) or not axes:
            raise StrategyError(
                f'Mesh takes a dict of axis names and sizes, such as {{"dp": 2, "tp": 4}}, not {axes!r}'
            )
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise StrategyError(f"mesh axis name {name!r} must be an identifier, such as 'dp'")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise StrategyError(f"mesh axis {name!r} has size {size!r}; a size is an int of 1 or more")
        object.__setattr__(self, "axes", tuple(axes))
        object.__setattr__(self, "sizes", tuple(axes.values()))

    @classmethod
    def flat(cls, device_num: int) -> Mesh:
        """The finest mesh of `device_num` devices: one axis d0, d1, ... for each prime factor, so that
        every split of a dim into a divisor of `device_num` parts can be written (8 is 2x2x2, 12 is 2x2x3).
        """
        if not isinstance(device_num, int) or isinstance(device_num, bool) or device_num < 1:
            raise StrategyError(f"device_num is {device_num!r}; it must be an int of 1 or more")
        return cls.of_sizes(_prime_factors(device_num) or (1,))

    @classmethod
    def of_sizes(cls, sizes: tuple[int, ...]) -> Mesh:
        """A mesh with axes d0, d1, ... of the given sizes."""
        return cls({f"d{i}": size for i, size in enumerate(sizes)})

    @cached_property
    def device_num(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """The size of the axis named `axis`. Raises StrategyError, naming the axes there are."""
        return self.sizes[self.index(axis)]

    def index(self, axis: str) -> int:
        """The position of the axis named `axis`. Raises StrategyError, naming the axes there are."""
        if axis not in self.axes:
            raise StrategyError(f"the mesh has no axis {axis!r}; its axes are {self}")
        return self.axes.index(axis)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where `rank` stands on each axis."""
        if not 0 <= rank < self.device_num:
            raise StrategyError(f"rank {rank} is not on the mesh {self}; its ranks are 0 to {self.device_num - 1}")
        coordinate = []
        for size in reversed(self.sizes):
            rank, position = divmod(rank, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """The rank that stands at `coordinate`."""
        rank = 0
        for position, size in zip(coordinate, self.sizes, strict=True):
            rank = rank * size + position
        return rank

    def position(self, rank: int, axes: Sequence[str]) -> int:
        """Where `rank` stands along `axes` together, the first of them the major one."""
        coordinate, position = self.coordinate(rank), 0
        for axis in axes:
            position = position * self.size(axis) + coordinate[self.index(axis)]
        return position

    def stride(self, axis: str) -> int:
        """How far apart the ranks of one group along `axis` are."""
        return math.prod(self.sizes[self.index(axis) + 1 :])

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, in order, `rank` among them."""
        stride, size = self.stride(axis), self.size(axis)
        first = rank - self.coordinate(rank)[self.index(axis)] * stride
        return tuple(first + i * stride for i in range(size))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.device_num)))

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    def __repr__(self) -> str:
        return f"Mesh({dict(zip(self.axes, self.sizes, strict=True))!r})"


def _prime_factors(n: int) -> tuple[int, ...]:
    factors, divisor = [], 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return (*factors, n) if n > 1 else tuple(factors)
