"""Has the graphs of collectives written, where PARTWAY_SAVE_GRAPHS asks for graphs and nothing is planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from partway.graphs.asked import asked
from partway.strategy.place import island_place

F = TypeVar("F", bound=Callable[..., Any])


def saved(call: F) -> F:
    """`call`, a collective with an argument `group`, or a method of an object with a group, whose graph is written
    when it is called. In an island it is in the graph of that."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if island_place() is None and (wanted := asked()) is not None:
            from partway.graphs import by_hand

            by_hand.save(wanted, call, args, kwargs)
        return call(*args, **kwargs)

    return run  # type: ignore[return-value]
