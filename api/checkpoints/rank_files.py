"""Files of single ranks, each with that rank's parts of the weights: read as the whole weights that they make."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partway.checkpoints.tensor_files import (
    SUFFIX,
    Slices,
    arrange,
    create,
    places_in,
    read_part,
    synchronize,
    write_part,
)
from partway.propagation.graph.port import Role
from partway.propagation.plan.plan import Plan
from partway.strategy import Layout, RuntimeStateError, StrategyError
from partway.strategy.errors import shown


@dataclass(frozen=True)
class RankFile:
    """The tensors in the file of one rank."""

    path: Path

    @cached_property
    def _tensors(self) -> Mapping[str, Any]:
        """Places in a safetensors file, or the tensors of one of torch.save, which stay on the disk."""
        if not self.path.is_file():
            raise RuntimeStateError(f"there is no file {self.path}")
        if self.path.suffix == SUFFIX:
            return places_in(self.path.parent, [self.path.name])
        try:
            tensors: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
                raise TypeError("it is not a dict of tensors")
        except Exception as error:
            why = str(error).splitlines()[0]
            raise RuntimeStateError(f"{self.path} holds no weights that can be read: {why}") from error
        return tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one of its tensors."""
        dtype: torch.dtype = self._tensors[name].dtype
        return dtype

    def read(self, name: str, slices: Slices, into: Tensor) -> None:
        """Copy what is at `slices` of one of its tensors."""
        tensor = self._tensors[name]
        if isinstance(tensor, Tensor):
            into.copy_(tensor[slices])
        else:
            read_part(self.path.parent, tensor, slices, into, lambda done: None)


class SavedRanks:
    """The weights in the files of the ranks of `strategy` (None: whole, in that of rank 0)."""

    def __init__(self, strategy: Plan | None, files: Mapping[int, Path]) -> None:
        self.strategy, self.files = strategy, files
        self.layouts = strategy.parameters if strategy else {}
        self._opened = {rank: RankFile(path) for rank, path in files.items()}
        first = self._opened[min(self._opened)]
        self.names = first.shapes
        if self.layouts and not self.layouts.keys() & self.names.keys():
            raise StrategyError(
                f"the strategy is of another model: it has {shown(next(iter(self.layouts)))}, and {first.path} has "
                f"{shown(next(iter(self.names), ''))}; give the strategy file of the training"
            )

    @classmethod
    def of(cls, strategy: Plan | None, files: Mapping[int, Path]) -> SavedRanks:
        """The weights in the files of all ranks."""
        count = strategy.mesh.device_num if strategy else 1
        if len(files) != count:
            of = f"the strategy is for {count} ranks" if strategy else "without a strategy the weights are in one file"
            raise RuntimeStateError(f"{of}, and {len(files)} files were given; give one of each rank, in their order")
        for rank, path in files.items():
            if not path.is_file():
                raise RuntimeStateError(f"there is no file {path}, the checkpoint of rank {rank}")
        return cls(strategy, files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight as a whole."""
        return shape_of(self.strategy, name) if name in self.layouts else self.names[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a weight."""
        return self._opened[min(self._opened)].dtype(name)

    def check(self, name: str, shape: tuple[int, ...], ranks: Iterable[int]) -> None:
        """Raise StrategyError if a weight has not this shape, and or RuntimeStateError if a file has another part."""
        if self.shape(name) != shape:
            raise StrategyError(
                f"{name} has shape {list(shape)} in the network, and was saved with {list(self.shape(name))}"
            )
        for rank in ranks:
            own = tuple(s.stop - s.start for s in self._own(name, shape, rank))
            held = self._opened[rank].shapes.get(name)
            if held != own:
                has = "is not in it" if held is None else f"has shape {list(held)} in it"
                raise RuntimeStateError(
                    f"{self.files[rank]} is not the checkpoint of rank {rank} under this strategy: {name} {has}, and "
                    f"the strategy gives it {list(own)}"
                )

    def read(self, name: str, shape: tuple[int, ...], wanted: Slices, into: Tensor) -> None:
        """Copy what is at `wanted` of a whole weight."""
        layout = self.layouts.get(name)
        for rank, own in holders(layout, shape):
            if rank in self._opened and (common := common_part(own, wanted)) is not None:
                there = tuple(slice(c.start - o.start, c.stop - o.start) for c, o in zip(common, own, strict=True))
                here = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(common, wanted, strict=True))
                self._opened[rank].read(name, there, into[here])

    def _own(self, name: str, shape: tuple[int, ...], rank: int) -> Slices:
        return slices_of(self.strategy, name, shape, rank)


def transformed(source: SavedRanks, target: Plan | None, rank: int, path: Path) -> Path:
    """Write the file of a rank of `target`, a tensor at a time."""
    wanted = {name: slices_of(target, name, source.shape(name), rank) for name in source.names}
    shapes = {name: tuple(s.stop - s.start for s in slices) for name, slices in wanted.items()}
    for name in source.names:
        source.check(name, source.shape(name), source.files)
        if target and name in target.parameters and shape_of(target, name) != source.shape(name):
            raise StrategyError(
                f"{name} was saved with shape {list(source.shape(name))}, and has {list(shape_of(target, name))} in "
                "the strategy for the new files; give strategies of one model"
            )

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, slices in wanted.items():
            part = torch.empty(shapes[name], dtype=source.dtype(name))
            source.read(name, source.shape(name), slices, part)
            yield name, part

    return written_file(path, {name: (source.dtype(name), shape) for name, shape in shapes.items()}, made())


def write_file(path: Path, parts: Mapping[str, Tensor]) -> Path:
    """Write tensors to the safetensors file `path`: all of it or nothing."""
    return written_file(path, {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}, parts.items())


def written_file(
    path: Path, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], parts: Iterable[tuple[str, Tensor]]
) -> Path:
    """Write tensors to the safetensors file `path`: all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = f".{path.name}.{os.getpid()}.saving"  # another process may make the same file
    (file,) = arrange(specs, path.stem, 1 << 62).values()
    (path.parent / aside).unlink(missing_ok=True)
    places = {name: type(place)(aside, place.start, place.dtype, place.shape) for name, place in file.places.items()}
    create(path.parent, {aside: file})
    for name, part in parts:
        write_part(path.parent, places[name], tuple(slice(0, size) for size in part.shape), part, lambda done: None)
    synchronize(path.parent, [aside])
    os.replace(path.parent / aside, path)
    return path


def shape_of(strategy: Plan | None, name: str) -> tuple[int, ...]:
    """The shape of a weight in a strategy, as a whole."""
    assert strategy is not None
    return next(tuple(t.shape) for t in strategy.inputs if t.name == name and t.role is Role.PARAMETER)


def slices_of(strategy: Plan | None, name: str, shape: tuple[int, ...], rank: int) -> Slices:
    """What a rank has of a weight under a strategy."""
    layout = strategy.parameters.get(name) if strategy else None
    return tuple(slice(0, size) for size in shape) if layout is None else layout.slices(shape, rank)


def holders(layout: Layout | None, shape: tuple[int, ...]) -> Iterator[tuple[int, Slices]]:
    """The parts of a weight, each with the first rank that has it."""
    if layout is None:
        yield 0, tuple(slice(0, size) for size in shape)
        return
    seen = set()
    for rank in range(layout.mesh.device_num):
        own = layout.slices(shape, rank)
        if (key := tuple((s.start, s.stop) for s in own)) not in seen:
            seen.add(key)
            yield rank, own


def common_part(one: Slices, other: Slices) -> Slices | None:
    """What two parts of a tensor have in common; None if that is nothing."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(s.stop <= s.start for s in common) else common
