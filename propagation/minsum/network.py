"""A problem as numbers: the cost of each option by itself, and of each pair of options of two vertices.

The three operators of __init__.py, with two options each:

    Costs(unary=((1, 0), (3, 2), (0, 6)), pairs={(0, 1): ((0, 5), (5, 0)), (1, 2): ((0, 4), (4, 0))})

    of((0, 0, 0)) = 1 + 3 + 0 + 0 + 0 = 4        of((1, 1, 0)) = 0 + 2 + 0 + 0 + 4 = 6

`Costs` has all numbers written out, as elimination takes them. A `Network` has each edge as a `Between`: a `Matrix`,
which is written out, or the `Converting` of one tensor, which is not: on four axes it has millions of entries.

`Found` is the result of a search for the least. Of the three operators: `Found((0, 0, 0), cost=4, bound=4, width=2)`,
proven; by visits alone `Found((1, 1, 0), cost=6, bound=-inf, width=1)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost.conversion import Codes, ConversionTable, Floats, Mask


@dataclass(frozen=True)
class Costs:
    """A problem as numbers: `unary[v][i]` is the cost of option i of vertex v, and `pairs[a, b][i, j]`, with a < b, is
    the cost of option i of a together with option j of b. Arrays that are one object are computed once."""

    unary: tuple[Floats, ...]
    pairs: Mapping[tuple[int, int], Floats]

    def of(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        alone = sum(float(costs[c]) for costs, c in zip(self.unary, choice, strict=True))
        return alone + sum(float(matrix[choice[a], choice[b]]) for (a, b), matrix in self.pairs.items())


class Between(ABC):
    """The costs of an edge [option of one end, option of the other]. The ends are side 0 and side 1."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The number of options of each end."""

    @abstractmethod
    def least(self, costs: Floats, side: int) -> Floats:
        """For each option of the other end, the least cost with an option of the end at `side`, whose own cost is in
        `costs`."""

    @abstractmethod
    def with_option(self, option: int, side: int) -> Floats:
        """For each option of the other end, the cost with `option` of the end at `side`."""

    @abstractmethod
    def take(self, rows: Mask, columns: Mask) -> Between:
        """The costs between some of the options."""

    @abstractmethod
    def at_most(self, most: float) -> Between:
        """The costs capped at `most`: messages must be finite, and impossible pairs cost inf."""


@dataclass(frozen=True, eq=False)
class Matrix(Between):
    """Costs that are written out."""

    costs: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of options of each end."""
        return self.costs.shape

    def least(self, costs: Floats, side: int) -> Floats:
        """As for Between."""
        least: Floats = (self.costs + costs[:, None]).min(axis=0) if side == 0 else (self.costs + costs).min(axis=1)
        return least

    def with_option(self, option: int, side: int) -> Floats:
        """As for Between."""
        costs: Floats = self.costs[option] if side == 0 else self.costs[:, option]
        return costs

    def take(self, rows: Mask, columns: Mask) -> Matrix:
        """As for Between."""
        return Matrix(np.ascontiguousarray(self.costs[rows][:, columns]))

    def at_most(self, most: float) -> Matrix:
        """As for Between."""
        return Matrix(np.minimum(self.costs, most))


@dataclass(frozen=True, eq=False)
class Converting(Between):
    """The costs of converting one tensor from its layout under an option of one end, a code in `rows`, to its layout
    under an option of the other, a code in `columns`; none above `most`. Never written out."""

    table: ConversionTable
    rows: Codes
    columns: Codes
    most: float = np.inf

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of options of each end."""
        return len(self.rows), len(self.columns)

    def least(self, costs: Floats, side: int) -> Floats:
        """As for Between."""
        here, there = (self.rows, self.columns) if side == 0 else (self.columns, self.rows)
        values = np.full(len(self.table.digits), np.inf)
        np.minimum.at(values, here, costs)
        least: Floats = np.minimum(self.table.spread(values, forward=side == 0)[there], costs.min() + self.most)
        return least

    def with_option(self, option: int, side: int) -> Floats:
        """As for Between."""
        if side == 0:
            row: Floats = np.minimum(self.table.rows([int(self.rows[option])])[0, self.columns], self.most)
            return row
        values = np.full(len(self.table.digits), np.inf)
        values[self.columns[option]] = 0.0
        column: Floats = np.minimum(self.table.spread(values, forward=False)[self.rows], self.most)
        return column

    def take(self, rows: Mask, columns: Mask) -> Converting:
        """As for Between."""
        return Converting(self.table, self.rows[rows], self.columns[columns], self.most)

    def at_most(self, most: float) -> Converting:
        """As for Between."""
        return Converting(self.table, self.rows, self.columns, min(self.most, most))


@dataclass(frozen=True)
class Network:
    """A problem for `narrow`, `propagate` and `revisit`: unary costs, and the costs between vertices."""

    unary: tuple[Floats, ...]
    edges: tuple[tuple[tuple[int, int], Between], ...]

    def of(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        alone = sum(float(costs[c]) for costs, c in zip(self.unary, choice, strict=True))
        return alone + sum(float(between.with_option(choice[a], 0)[choice[b]]) for (a, b), between in self.edges)

    def at_most(self, most: float) -> Network:
        """The network with pair costs capped at `most`; equal edges stay one object."""
        capped = {id(between): between.at_most(most) for _, between in self.edges}
        return Network(self.unary, tuple((ends, capped[id(between)]) for ends, between in self.edges))


def network(costs: Costs) -> Network:
    """The network of costs that are written out."""
    matrices = {id(array): Matrix(array) for array in costs.pairs.values()}
    return Network(costs.unary, tuple((ends, matrices[id(array)]) for ends, array in costs.pairs.items()))


def among(kept: Sequence[Codes], choice: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the options of `choice` among those kept; where one was left out, the first."""
    return tuple(int(np.argmax(rows == c)) for rows, c in zip(kept, choice, strict=True))


def originals(kept: Sequence[Codes], choice: Iterable[int]) -> tuple[int, ...]:
    """The options of `choice`, numbered among those kept, by their numbers among all."""
    return tuple(int(rows[c]) for rows, c in zip(kept, choice, strict=True))


# -- The result of a search

Choice = tuple[int, ...]  # one option for each vertex, by number


@dataclass(frozen=True)
class Found:
    """One option per vertex, its cost, and a proven lower bound on the cost of every choice.

    width   the most vertices that one table of the search joined
    """

    choice: Choice
    cost: float
    bound: float
    width: int = 1

    @property
    def gap(self) -> float:
        """The distance of the cost from the bound, relative to the cost."""
        return (self.cost - self.bound) / max(abs(self.cost), 1e-12)

    @property
    def proven(self) -> bool:
        """Whether nothing costs less."""
        return self.cost - self.bound <= 1e-9 * max(abs(self.cost), 1e-12)
