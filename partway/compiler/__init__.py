"""The compiler's driver: from a call to a plan, and to the programs that ranks run.

driver.py                   the stages of a call, in one function
passes.py                   the passes, in tables
meshes.py                   the meshes to plan on
pick_by_step_time.py        of several plans, the one with the shortest predicted step
replan_within_memory.py     a plan whose program stays within the memory limit
suggest_what_fits.py        alternatives if no plan fits
capture_call.py             the graph of a call; captures.py: captured calls on disk
compiled.py                 a planned call, which makes its programs at the first access
planning_lock.py            one thread plans at a time
graphs_asked.py, graphs_record.py   PARTWAY_SAVE_GRAPHS: the result of each pass, in files
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partway.strategy.basics import at_first_use

if TYPE_CHECKING:
    from partway.compiler.graphs_asked import asked
else:
    __getattr__ = at_first_use(
        __name__,
        {
            "graphs_asked": "asked",
        },
    )

__all__ = [
    "asked",
]
