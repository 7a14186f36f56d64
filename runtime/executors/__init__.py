"""Executors of a program: all ranks in this process, or this process's rank of a process group.

simulate.py         all ranks in one process; meetings.py: each kind of collective; one_device.py: one rank
execute.py          one rank of a process group; issue.py: each kind of collective
couriers.py         values that cross from one mesh to another
waiting.py          gradients whose reductions wait
peak.py             the bytes that a rank holds while a step runs, from its graphs
"""

from __future__ import annotations

from .issue import all_gather, reduce_scatter

__all__ = [
    "all_gather",
    "reduce_scatter",
]
