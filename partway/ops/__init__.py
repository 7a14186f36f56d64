"""Collectives as operators, which each rank calls with its own tensors, and the operators of a mixture of experts
(`pw.ops`).

    collectives.py  all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, permute
    neighbors.py    neighbor_exchange, neighbor_exchange_v2
    classes.py      the same with MindSpore's interface: AllReduce(op, group)(x), ...
    groups.py       create_group, destroy_group; the ranks of a group by number
    manual.py       manual functions, which each rank runs on its parts
    where.py        the mesh and the place of the rank that runs a program
    experts.py      dispatch, combine, grouped_matmul, per_expert: for whole tensors, as any other operator

Collectives are called in a manual function (`pw.manual`), or by the processes of a launcher. Gradients are those of the
sum of the objectives of all ranks: see docs/manual.md.
"""

from __future__ import annotations

from partway.ops.classes import (
    AllGather,
    AllReduce,
    AlltoAll,
    Broadcast,
    NeighborExchange,
    NeighborExchangeV2,
    ReduceScatter,
)
from partway.ops.collectives import ReduceOp, all_gather, all_reduce, all_to_all, broadcast, permute, reduce_scatter
from partway.ops.experts import combine, dispatch, grouped_matmul, per_expert
from partway.ops.neighbors import neighbor_exchange, neighbor_exchange_v2

__all__ = [
    "AllGather",
    "AllReduce",
    "AlltoAll",
    "Broadcast",
    "NeighborExchange",
    "NeighborExchangeV2",
    "ReduceOp",
    "ReduceScatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "combine",
    "dispatch",
    "grouped_matmul",
    "neighbor_exchange",
    "neighbor_exchange_v2",
    "per_expert",
    "permute",
    "reduce_scatter",
]
