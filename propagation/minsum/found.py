"""The result of minimizing `Costs` or a `Network`.

For the three operators of __init__.py, elimination gives `Found((0, 0, 0), cost=4, bound=4, width=2)`, which is proven,
and `propagate` gives `Found((1, 1, 0), cost=6, bound=-inf, width=1)`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
