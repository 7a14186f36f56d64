"""Divide parameters into pieces of their first dim, and the pieces among the servers, by bytes.

Pieces are the unit in which data moves when servers come and go, so that only the necessary data is sent. The division
of a parameter depends on the job alone, and not on the number of servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LARGEST, SMALLEST = 4 * 2**20, 2**16  # bytes of a piece
_OF_A_TABLE = 8  # the most pieces of a table by rows
_SHARES = 32  # the approximate number of pieces of all parameters, between these two


@dataclass(frozen=True)
class Parameter:
    """The servers' description of a parameter.

    index        its number among those of the optimizer
    name         for messages
    group        the number of its group in the optimizer
    by_rows      only the rows that a step touches are pulled and pushed
    on_workers   the workers take its step, each by itself; the servers average its gradients, and keep a copy
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    item: int
    group: int = 0
    by_rows: bool = False
    on_workers: bool = False

    @property
    def rows(self) -> int:
        """The size of its first dim; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape[1:]) * self.item


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of a parameter."""

    parameter: int
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its key: unique within a job."""
        return f"{self.parameter}:{self.start}"


def divide(parameters: Sequence[Parameter], by_element: bool) -> tuple[RowRange, ...]:
    """All pieces of a job. `by_element`: the optimizer's step of a row does not depend on others; otherwise parameters
    stay whole."""
    total = sum(parameter.rows * parameter.row_bytes for parameter in parameters)
    target = min(max(total // _SHARES, SMALLEST), LARGEST)
    pieces = []
    for parameter in parameters:
        rows = parameter.rows
        count = max(1, math.ceil(rows * parameter.row_bytes / target)) if by_element else 1
        if parameter.by_rows:  # a step takes some rows of each of its pieces
            count = min(count, _OF_A_TABLE)
        height = max(1, math.ceil(rows / count))
        starts = range(0, max(rows, 1), height)
        pieces += [RowRange(parameter.index, start, min(start + height, rows)) for start in starts]
    return tuple(pieces)


def assign(sizes: Mapping[str, int], servers: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """Assign each piece to a server: about as many bytes to each, with as many pieces as possible where they were
    `before`.

    sizes   bytes of each piece, by its key
    """
    names = sorted(servers)
    load = dict.fromkeys(names, 0)
    found: dict[str, str] = {}
    for key, size in sizes.items():
        if (server := before.get(key)) in load:
            assert server is not None
            found[key] = server
            load[server] += size
    for key in sorted(sizes.keys() - found.keys(), key=lambda key: (-sizes[key], key)):
        found[key] = least = min(names, key=lambda name: (load[name], name))
        load[least] += sizes[key]
    while True:
        most, least = max(names, key=lambda name: (load[name], name)), min(names, key=lambda name: (load[name], name))
        gap = load[most] - load[least]
        fits = [key for key, server in found.items() if server == most and 0 < sizes[key] < gap]
        if not fits:
            return found
        best = min(fits, key=lambda key: (abs(gap - 2 * sizes[key]), key))  # balances the two best
        if abs(gap - 2 * sizes[best]) >= gap:
            return found
        found[best] = least
        load[most], load[least] = load[most] - sizes[best], load[least] + sizes[best]
