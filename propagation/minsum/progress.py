"""The progress of a search: the cost of its best plan, and the lower bound. Listeners are told; without any it costs no
time, and they do not affect the search."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ...strategy.basics.blocks import meanwhile, under_way

Hear = Callable[[float, float], None]  # the cost of the best plan, and the bound


def listening(hear: Hear) -> AbstractContextManager[None]:
    """Call `hear` with the progress of the searches in the block."""
    return meanwhile(hearing=(*under_way().hearing, hear))


def tell(cost: float, bound: float) -> None:
    """Report that the best plan costs `cost`, and that none costs less than `bound`."""
    for hear in under_way().hearing:
        hear(cost, bound)
