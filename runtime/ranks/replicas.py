"""Copies that several ranks hold: the same part of a parameter, a buffer, a gradient or an optimizer's state.

Once ranks agree, nothing sends these from one to another, so a change that one rank makes to its own copies stays
there: its optimizer has another learning rate, a gradient is clipped or zeroed, a weight is written to. During
training, each rank samples some copies in turn: at each call of a sharded function the tensors that it takes, at each
step of an optimizer its settings, gradients and states. The ledgers compare the samples (`ledger.py`). Every so many
calls and steps, on request, all elements of all copies are summed up; and `differing` compares everything at once
before it is written to disk.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_internals import local_part_of
from .ledger import Ledger, checksum, sample
from .watch import EVERY, watch

T = TypeVar("T")
_EACH = 4  # copies sampled each time


def holders(tensor: Tensor, among: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The ranks that hold the same part of `tensor` as this one: for a tensor that is whole everywhere all ranks, or
    the ranks `among` which it is used; none for partial sums."""
    if isinstance(tensor, DTensor):
        return _holders(tensor.device_mesh, tensor.placements)
    return tuple(range(dist.get_world_size())) if among is None else among


@functools.lru_cache(maxsize=256)
def _holders(mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in placements):
        return ()
    alike = (slice(None) if p.is_replicate() else at for p, at in zip(placements, coordinate, strict=True))
    return tuple(sorted(mesh.mesh[tuple(alike)].flatten().tolist()))


def ledger_of(ranks: tuple[int, ...]) -> Ledger:
    """The ledger that this rank, one of `ranks`, shares with them."""
    own = watch()
    if len(ranks) == own.size:
        return own.ledger(EVERY, ranks)
    return own.ledger(f"{EVERY}/{ranks[0]}/{len(ranks)}/{zlib.crc32(repr(ranks).encode())}", ranks)


@functools.lru_cache(maxsize=256)
def ranks_of(mesh: Any) -> tuple[int, ...]:
    """The ranks of a DeviceMesh."""
    return tuple(mesh.mesh.flatten().tolist())


def in_turn(items: Sequence[T], time: int, every: int) -> tuple[list[T], bool]:
    """The `items` whose turn it is at the `time`-th time, and whether they are compared in full: all items are, every
    `every`-th time, if that is not 0."""
    if every > 0 and time % every == 0:
        return list(items), True
    count = min(_EACH, len(items))
    return [items[(time * count + k) % len(items)] for k in range(count)], False


def note(copies: Iterable[tuple[str, Tensor]], where: str, time: int, whole: bool, among: tuple[int, ...]) -> None:
    """Record what this rank, one of those `among`, holds of the named `copies`, for the `time`-th time, at `where`: a
    few elements of each, or a checksum of the `whole`."""
    for name, tensor in copies:
        ranks = holders(tensor, among)
        if len(ranks) < 2 or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        part = local_part_of(tensor) if isinstance(tensor, DTensor) else tensor
        found = checksum(part) if whole else sample(part, time)
        if found is not None:
            ledger_of(ranks).holds(found, f"{name}, at {where}")


def differing(
    copies: Mapping[str, tuple[tuple[int, ...], Tensor]], exchange: Callable[[Any], list[Any]]
) -> list[tuple[str, int, int]]:
    """The named `copies` that differ, each with two ranks that differ. A copy comes with the ranks that hold it, and
    this rank's part. `exchange` gives the values of all ranks, by rank; every rank calls this."""
    groups: dict[tuple[int, ...], dict[str, int]] = {}
    for name, (ranks, part) in copies.items():
        if len(ranks) > 1 and part.layout is torch.strided:
            groups.setdefault(ranks, {})[name] = checksum(part)
    if not _pairs(exchange({ranks: zlib.crc32(repr(found).encode()) for ranks, found in groups.items()})):
        return []
    every = exchange(groups)
    found: dict[str, tuple[str, int, int]] = {}
    for group, first, rank in _pairs(every):
        one, other = every[first][group], every[rank][group]
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                found.setdefault(name, (name, first, rank))
    return list(found.values())


def _pairs(by_rank: Sequence[Mapping[tuple[int, ...], Any]]) -> list[tuple[tuple[int, ...], int, int]]:
    """The groups in which a rank has another value than the first rank with the group: (group, first rank, rank)."""
    first: dict[tuple[int, ...], int] = {}
    pairs = []
    for rank, groups in enumerate(by_rank):
        for group, value in groups.items():
            other = first.setdefault(group, rank)
            if by_rank[other][group] != value:
                pairs.append((group, other, rank))
    return pairs


def settings_of(groups: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The settings of an optimizer's groups, without the parameters: for each setting its value in every group. A
    tensor on the CPU counts by its values, and any value other than numbers, texts and tuples of them by its type."""
    return {
        key: tuple(_plain(group.get(key)) for group in groups)
        for key in dict.fromkeys(key for group in groups for key in group)
        if key != "params"
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, Tensor) and value.device.type == "cpu":
        return repr(value.tolist())
    return type(value).__name__
