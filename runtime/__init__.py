"""Running a program: all ranks simulated in one process (`Simulator`), or this rank of a process group (`Worker`).

Both run the same graphs, through a `CompiledStep`, and report the same collectives to `record_collectives`.
"""

from __future__ import annotations

from .agreement import Fact, agree, agreement, facts_of
from .execute import Worker, broadcast, device_mesh
from .loaded import Executor
from .parameters import as_dtensor, distribute, placed_part, redistribute, shard_tensor
from .process import get_group_size, get_rank, init, launched, shutdown
from .random_state import generators, share_generators
from .record import Event, record_collectives, record_timeline
from .simulate import Simulator, join, split
from .step import CompiledStep

__all__ = [
    "CompiledStep",
    "Event",
    "Executor",
    "Fact",
    "Simulator",
    "Worker",
    "agree",
    "agreement",
    "as_dtensor",
    "broadcast",
    "device_mesh",
    "distribute",
    "facts_of",
    "generators",
    "get_group_size",
    "get_rank",
    "init",
    "join",
    "launched",
    "placed_part",
    "record_collectives",
    "record_timeline",
    "redistribute",
    "shard_tensor",
    "share_generators",
    "shutdown",
    "split",
]
