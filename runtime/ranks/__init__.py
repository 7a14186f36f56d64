"""What ranks know of each other: they compare what has to be the same everywhere, and no rank waits in vain.

watch.py            the thread that asks and answers; doing.py, answering.py; over NCCL flights.py
agreement.py        the comparison before a plan is followed
ledger.py           the comparison while steps run; replicas.py: of parameters and states
expert_load.py      the rows that each expert gets
stragglers.py       the ranks that others wait for; device_memory.py: the memory of each rank's device
world.py            values that are kept as long as a process group lasts
"""

from __future__ import annotations

from .agreement import gathered
from .answering import AnsweringStore
from .doing import first_line, named
from .replicas import differing, holders

__all__ = [
    "AnsweringStore",
    "differing",
    "first_line",
    "gathered",
    "holders",
    "named",
]
