"""The work in progress of each thread: the function that it captures and plans, and the listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .afterwards import afterwards

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
