"""Blocks that restore something when they end, also when an exception or an interrupt ends them; and the work in
progress of each thread, which such blocks say: the function that it captures and plans, and the listeners."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any


@contextmanager
def afterwards(restore: Callable[[], object]) -> Iterator[None]:
    """Call `restore` when the block ends. It is called twice, so it has to be idempotent: an interrupt (Ctrl-C) may cut
    the first call short at any line, and the second call completes it."""
    try:
        try:
            yield
        finally:
            restore()
    finally:
        restore()


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off. Capturing a deep model and reading a large file make millions of objects that stay
    in use, and the collector would take longer to traverse them again and again than the work itself."""
    enabled = gc.isenabled()
    with afterwards(lambda: gc.enable() if enabled else None):
        gc.disable()
        yield


# -- The work in progress

if TYPE_CHECKING:
    from ..mesh import Mesh
    from ..place import Place


@dataclass(frozen=True)
class UnderWay:
    """The work of one thread.

    mesh        the mesh of the function that is captured, if it is known already
    capturing   whether torch.export traces a function
    hooking     whether hooks that compute parameters run, to be captured with their function
    manual      the place of the rank whose manual function is traced; None outside of manual functions
    planned     the engine whose function is planned
    hearing     listeners to a search: each gets the cost of the best plan, and the bound
    telling     the log of planning
    """

    mesh: Mesh | None = None
    capturing: bool = False
    hooking: bool = False
    manual: Place | None = None
    planned: object = None
    hearing: tuple[Callable[[float, float], None], ...] = ()
    telling: Any = None


_NOTHING = UnderWay()
_under_way: ContextVar[UnderWay] = ContextVar("under way", default=_NOTHING)


def under_way() -> UnderWay:
    """The work in progress of this thread."""
    return _under_way.get()


@contextmanager
def meanwhile(**facts: Any) -> Iterator[None]:
    """A block in which fields of `under_way()` have the values `facts`."""
    before = _under_way.get()
    with afterwards(lambda: _under_way.set(before)):
        _under_way.set(replace(before, **facts))
        yield


# -- The progress of a search: the cost of its best plan, and the lower bound. For the three operators of the page of
# `propagation/minsum/`, `narrow` from a plan that costs 6 reports (6, 4) after its first sweep: the plan costs 6, and
# none costs less than 4. Listeners do not affect the search, and without listeners a report costs no time

Hear = Callable[[float, float], None]  # the cost of the best plan, and the bound


def listening(hear: Hear) -> AbstractContextManager[None]:
    """Call `hear` with the progress of the searches in the block."""
    return meanwhile(hearing=(*under_way().hearing, hear))


def tell(cost: float, bound: float) -> None:
    """Report that the best plan costs `cost`, and that none costs less than `bound`."""
    for hear in under_way().hearing:
        hear(cost, bound)
