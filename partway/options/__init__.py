"""The options of users: their definitions, their validation, and the values in force.

The input is keyword arguments of `set_auto_parallel_context` and similar functions. The output is frozen values, each
validated once, or one ContextError that lists all problems.

    parallel     `ParallelContext`, the options of the parallel context, those inside its options, and closed choices
    algo         `AlgoParameters`, the options of the strategy search
    base         the base class of all options
    typed        the options as type checkers and `help` see them

The functions that users call, and the two values in force, are in `partway.options.context`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.options.context import current
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "context": "current",
        },
    )

__all__ = [
    "current",
]
