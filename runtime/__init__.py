"""Run a step: all ranks simulated in one process (`Simulator`), or this rank of a process group (`Worker`).

The input is the graphs of a `Program` and the tensors of a call; the output is its results, with gradients by autograd.
Both executors run the same instructions and report the same collectives to `record_collectives`.

    code/               a graph as a Python function
    ranks/              what ranks know of each other
    executors/          all ranks in one process, or one of a process group
    tensors/            parameters and results that are split
    launching/          the launcher of this process, and how the processes meet
    loaded.py           one call: the forward, the saved values, the backward; random_state.py
    actions.py          a step as a list of actions of stages, which a schedule orders
    by_hand.py          collectives that people call; groups.py: the ranks that call them
"""

from __future__ import annotations

from .code.loaded_graph import Executor
from .code.recorders import Event, record_collectives, record_timeline
from .executors.execute import Worker, broadcast, device_mesh
from .executors.simulate import Simulator, join, split
from .launching.process import get_group_size, get_local_rank, get_rank, init, launched, shutdown
from .loaded import Loaded
from .random_state import generators, share_generators
from .ranks.agreement import Fact, agree, agreement, facts_of
from .ranks.watch import watch
from .tensors.parameters import as_dtensor, distribute, placed_part, redistribute, shard_tensor
from .torch_internals import default_store, local_part_of, timeout_of

__all__ = [
    "Event",
    "Executor",
    "Fact",
    "Loaded",
    "Simulator",
    "Worker",
    "agree",
    "agreement",
    "as_dtensor",
    "broadcast",
    "default_store",
    "device_mesh",
    "distribute",
    "facts_of",
    "generators",
    "get_group_size",
    "get_local_rank",
    "get_rank",
    "init",
    "join",
    "launched",
    "local_part_of",
    "placed_part",
    "record_collectives",
    "record_timeline",
    "redistribute",
    "shard_tensor",
    "share_generators",
    "shutdown",
    "split",
    "timeout_of",
    "watch",
]
