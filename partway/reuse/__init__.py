"""Reuse of plans: whether an earlier plan holds for another call.

A plan holds while calls resemble the one it was made for, and while the Python code would do the same again. The input
is a function and a call of it; the output is the runner of an earlier plan, or None, and then the call is planned. This
has to be fast: a call like the last one costs only comparisons.

    guard.py        whether a call is like the last one: the only check of a usual call
    courses.py      the plans of a function, by signature, by state, and by the answers to its questions about values
    changing.py     sizes and ints that change from call to call, and captures for all of them
    replanning.py   why a call was planned again
    state.py        the state that a function reads beside its arguments, compared before each call
    reachable.py    the objects of that state: those that code can reach by its names (code_names.py, libraries.py)
    kinds.py        the kinds of those objects: what is inside, when two values count as the same, what is not watched
    effects.py      the side effects of a function in its capture, repeated by each call
    portable.py     state as a digest that other processes can compare
    cache.py        plans and programs on disk
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.reuse.cache import cache_folder, cache_limit, folder_named
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "cache": "cache_folder cache_limit folder_named",
        },
    )

__all__ = [
    "cache_folder",
    "cache_limit",
    "folder_named",
]
