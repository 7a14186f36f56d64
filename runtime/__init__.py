"""Running a step: all ranks simulated in one process (`Simulator`), or this rank of a process group (`Worker`).

In come the graphs of a `Step` and the tensors of a call; out go its results, and gradients by autograd. Both executors
run the same instructions, and tell `record_collectives` of the same collectives.

    step.py             one call: forward, what is saved, backward. Its parts: loaded.py (a graph as a function, for an
                        executor and a backend), waiting.py (gradients that wait), random_state.py, inductor.py
    instructions.py     a graph as instructions (assemble.py, memory.py), and these as a Python function (functions.py)
    simulate.py         all ranks in one process, by stretches.py; meetings.py: each kind of collective. Where there is
                        one rank: one_device.py
    execute.py          one rank of a process group; issue.py: each kind of collective
    by_hand.py          collectives that people call; groups.py: of which ranks
    local_conversions.py, slices.py, strides.py     what a rank does to its own part
    parameters.py       parameters as DTensors; replaced.py: what holds the old objects; optimizers.py: what steps them
    results.py          large results that stay split, and mix with plain tensors
    weights.py          the weights in a state_dict, which say that they are split
    ps/                 the parameter server
    process.py          the processes and their meeting
    launching/          what started this one; the scheduler and its workers; who is let in
    gpus.py             which GPU a rank takes, and who may share one
    watch.py            what ranks know of each other: agreement.py, ledger.py, doing.py; over NCCL flights.py
    record.py           what ran, and when
    peak.py             how many bytes a rank holds while a step runs, from its text
"""

from __future__ import annotations

from .agreement import Fact, agree, agreement, facts_of
from .execute import Worker, broadcast, device_mesh
from .loaded import Executor
from .parameters import as_dtensor, distribute, placed_part, redistribute, shard_tensor
from .process import get_group_size, get_local_rank, get_rank, init, launched, shutdown
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
    "get_local_rank",
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
