"""How far a search under way has come: what its best plan costs, and what no plan costs less than. It is told to those
who listen, which takes no time where nobody does; what they hear changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Hear = Callable[[float, float], None]  # the cost of the best plan, and the bound
_listeners: list[Hear] = []


@contextmanager
def listening(hear: Hear) -> Iterator[None]:
    """`hear` is told of the searches in the block."""
    _listeners.append(hear)
    try:
        yield
    finally:
        _listeners.remove(hear)


def tell(cost: float, bound: float) -> None:
    """The best plan costs `cost`, and none costs less than `bound`."""
    for hear in _listeners:
        hear(cost, bound)
