"""The progress of a search: the cost of its best plan, and the lower bound.

For the three operators of __init__.py, `narrow` from a plan that costs 6 reports (6, 4) after its first sweep: the plan
costs 6, and none costs less than 4. Once it has found the plan that costs 4, it reports (4, 4).

Listeners do not affect the search. Without listeners a report costs no time.
"""

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
