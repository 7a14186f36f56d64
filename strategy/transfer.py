"""Transfers of a tensor from one mesh to another, as between two stages of a pipeline.

A layout gives the part of each rank of a mesh. One transfer is the block that rank s of the source mesh has and rank t
of the target mesh needs:

    [8, 4] on source [tp:S0] of ranks 0, 1 to target [tp:S1] of ranks 2, 3

    0 -> 2  [0:4, 0:2]      1 -> 2  [4:8, 0:2]
    0 -> 3  [0:4, 2:4]      1 -> 3  [4:8, 2:4]

Ranks of the source that hold the same part take turns, so that sending is spread over replicas; a rank on both meshes
keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .errors import StrategyError
from .layout import Layout

Block = tuple[slice, ...]  # of the whole tensor, a slice of each dim


@dataclass(frozen=True, slots=True)
class Transfer:
    """The `block` of a tensor that the rank `source` of its mesh sends to the rank `target` of another mesh."""

    source: int
    target: int
    block: Block


@lru_cache(maxsize=1024)
def transfers(source: Layout, target: Layout, shape: tuple[int, ...]) -> tuple[Transfer, ...]:
    """The transfers that convert a tensor of global `shape` from the layout `source` to `target`, on another mesh, in
    the order of target ranks. Each of these gets its part once.

    Raises StrategyError if ranks of the source hold partial sums, which have to be reduced on their mesh first.
    """
    if source.adds:
        raise StrategyError(
            f"a tensor of partial sums ({source}) cannot go to another mesh ({target.mesh}); reduce it on its own first"
        )
    return tuple(_transfers(source, target, shape))


def _transfers(source: Layout, target: Layout, shape: tuple[int, ...]) -> Iterator[Transfer]:
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(source.mesh.device_num):
        held = tuple((s.start, s.stop) for s in source.slices(shape, rank))
        holders.setdefault(held, []).append(rank)
    for rank in range(target.mesh.device_num):
        wanted, process = target.slices(shape, rank), target.mesh.ranks[rank]
        for ranks in holders.values():
            block = common_part(wanted, source.slices(shape, ranks[0]))
            if block is not None:
                own = next((each for each in ranks if source.mesh.ranks[each] == process), None)
                yield Transfer(ranks[rank % len(ranks)] if own is None else own, rank, block)


def common_part(one: Block, other: Block) -> Block | None:
    """The intersection of two parts of a tensor; None if it is empty."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(s.stop <= s.start for s in common) else common


def within(block: Block, part: Block) -> Block:
    """The place of a `block` of the whole tensor in the `part` of a rank."""
    return tuple(slice(b.start - p.start, b.stop - p.start) for b, p in zip(block, part, strict=True))
