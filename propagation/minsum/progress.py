"""How far a search under way has come: what its best plan costs, and what no plan costs less than. It is told to those
who listen, which takes no time where nobody does; what they hear changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ...strategy.basics.under_way import meanwhile, under_way

Hear = Callable[[float, float], None]  # the cost of the best plan, and the bound


def listening(hear: Hear) -> AbstractContextManager[None]:
    """`hear` is told of the searches in the block."""
    return meanwhile(hearing=(*under_way().hearing, hear))


def tell(cost: float, bound: float) -> None:
    """The best plan costs `cost`, and none costs less than `bound`."""
    for hear in under_way().hearing:
        hear(cost, bound)
