"""Helpers of all stages, independent of sharding.

choice              enums that are strings
files               atomic writes of files
blocks              blocks that clean up, and what a thread is capturing and planning
suggest             names that a person may have meant
units, extras       sizes and times in readable units, and how to install an extra
kits                the doors through which the core calls kits
first_use           names of a package whose modules are imported when they are first used
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .first_use import at_first_use

if TYPE_CHECKING:
    from .choice import Choice
    from .extras import install_extra
    from .files import FOREIGN, MARKS, first_problem, held, json_of, naming, reason, replacing, save, write_whole
    from .suggest import did_you_mean, nearest
    from .units import human, lasting
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "choice": "Choice",
            "extras": "install_extra",
            "files": "FOREIGN MARKS first_problem held json_of naming reason replacing save write_whole",
            "suggest": "did_you_mean nearest",
            "units": "human lasting",
        },
    )

__all__ = [
    "FOREIGN",
    "MARKS",
    "Choice",
    "at_first_use",
    "did_you_mean",
    "first_problem",
    "held",
    "human",
    "install_extra",
    "json_of",
    "lasting",
    "naming",
    "nearest",
    "reason",
    "replacing",
    "save",
    "write_whole",
]
