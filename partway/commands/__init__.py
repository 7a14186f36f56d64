"""The `partway` command.

cli.py              the subcommands and their options
jobs.py             `partway run`; plan_command.py: `partway plan`; compare_graphs.py: `partway diff`
named.py, spelling.py
                    functions by name, and values as text, of a command line
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.commands.compare_graphs import SavedCall, differences, saved_calls, strategies
    from partway.commands.named import find, kind_of
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "compare_graphs": "SavedCall differences saved_calls strategies",
            "named": "find kind_of",
        },
    )

__all__ = [
    "SavedCall",
    "differences",
    "find",
    "kind_of",
    "saved_calls",
    "strategies",
]
