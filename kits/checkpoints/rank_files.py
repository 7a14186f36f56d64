"""Files of single ranks, each with that rank's parts of the weights, read as whole weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from partway.checkpoints.tensor_files import (
    SUFFIX,
    Slices,
    arrange,
    begin,
    notes_in,
    places_in,
    read_part,
    synchronize,
    write_part,
)
from partway.propagation.graph import Role
from partway.propagation.plan import Plan
from partway.strategy import Layout, RuntimeStateError, StrategyError, common_part, shown, within
from partway.strategy.basics import FOREIGN, first_problem, json_of, replacing

_NOTE = "partway"  # its name in a file's header


class Note(BaseModel):
    """The description of a rank's file in its header: the rank and the number of ranks, the range of its tensors along
    each dim of the whole ones, and a digest of the strategy, "" if there is none."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    rank: int = Field(ge=0)
    ranks: int
    parts: dict[str, tuple[tuple[int, int], ...]]
    strategy: str = ""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Note:
        if self.rank >= self.ranks:
            raise ValueError(f"it would be rank {self.rank} of {self.ranks}")
        return self

    @classmethod
    def of(cls, rank: int, ranks: int, parts: Mapping[str, Slices], strategy: Plan | None) -> Note:
        """The note of the parts at these slices under `strategy`."""
        spans = {name: tuple((s.start, s.stop) for s in part) for name, part in parts.items()}
        return cls(rank=rank, ranks=ranks, parts=spans, strategy=digest_of(strategy))


@dataclass(frozen=True)
class RankFile:
    """The tensors in the file of one rank."""

    path: Path

    @cached_property
    def note(self) -> Note | None:
        """Its note; None for a file of another program, or of torch.save."""
        if self.path.suffix != SUFFIX or (text := notes_in(self.path).get(_NOTE)) is None:
            return None
        try:
            json_of(text.encode())
            return Note.model_validate_json(text)
        except ValueError as error:
            why = first_problem(error) if isinstance(error, ValidationError) else f"it {error}"
            raise RuntimeStateError(f"the description in {self.path} cannot be read: {why}") from error

    @cached_property
    def _tensors(self) -> Mapping[str, Any]:
        """Places in a safetensors file, or the tensors of one of torch.save, which stay on the disk."""
        if not self.path.is_file():
            raise RuntimeStateError(f"there is no file {self.path}")
        if self.path.suffix == SUFFIX:
            return places_in(self.path.parent, [self.path.name])
        try:
            tensors: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            if not all(isinstance(t, Tensor) and t.layout is torch.strided for t in tensors.values()):
                raise TypeError("it is not a dict of tensors")
        except Exception as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
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
        """Copy the range `slices` of one of its tensors."""
        tensor = self._tensors[name]
        if isinstance(tensor, Tensor):
            into.copy_(tensor[slices])
        else:
            read_part(self.path.parent, tensor, slices, into, lambda done: None)


class SavedRanks:
    """The weights in the files of the ranks of `strategy` (None: whole, in that of rank 0)."""

    def __init__(self, strategy: Plan | None, files: Mapping[int, RankFile]) -> None:
        self.strategy, self._opened = strategy, files
        self.files = {rank: file.path for rank, file in files.items()}
        self.layouts = strategy.parameters if strategy else {}
        self._digest = digest_of(strategy)
        if strategy:
            _check_notes(files, strategy.mesh.device_num)
        first = self._opened[min(self._opened)]
        self.names = first.shapes
        if self.layouts and not self.layouts.keys() & self.names.keys():
            raise StrategyError(
                f"the strategy is of another model: it has {shown(next(iter(self.layouts)))}, and {first.path} has "
                f"{shown(next(iter(self.names), ''))}; give the strategy file of the training"
            )

    @classmethod
    def of(cls, strategy: Plan | None, files: Mapping[int, Path]) -> SavedRanks:
        """The weights in the files of all ranks, in the order of ranks, or in any if the files state their ranks."""
        count = strategy.mesh.device_num if strategy else 1
        if len(files) != count:
            of = f"the strategy is for {count} ranks" if strategy else "without a strategy the weights are in one file"
            raise RuntimeStateError(f"{of}, and {len(files)} files were given; give one of each rank, in their order")
        for rank, path in files.items():
            if not path.is_file():
                raise RuntimeStateError(f"there is no file {path}, the checkpoint of rank {rank}")
        opened = {rank: RankFile(path) for rank, path in files.items()}
        return cls(strategy, _by_rank(opened) if strategy else opened)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a weight."""
        return shape_of(self.strategy, name) if name in self.layouts else self.names[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a weight."""
        return self._opened[min(self._opened)].dtype(name)

    def check(self, name: str, shape: tuple[int, ...], ranks: Collection[int]) -> None:
        """Raise StrategyError if a weight does not have this shape, and RuntimeStateError if a file has another
        part."""
        if self.shape(name) != shape:
            raise StrategyError(
                f"{name} has shape {list(shape)} in the network, and was saved with {list(self.shape(name))}"
            )
        for rank in ranks:
            spans = tuple((s.start, s.stop) for s in self._own(name, shape, rank))
            own = tuple(stop - start for start, stop in spans)
            held, note = self._opened[rank].shapes.get(name), self._opened[rank].note
            if note is not None and note.parts.get(name, spans) != spans:
                raise RuntimeStateError(
                    f"{self.files[rank]} holds {_span(note.parts[name])} of {name}, and the strategy gives rank {rank} "
                    f"{_span(spans)}; give the strategy file of its training"
                )
            if held != own:
                has = "is not in it" if held is None else f"has shape {list(held)} in it"
                raise RuntimeStateError(
                    f"{self.files[rank]} is not the checkpoint of rank {rank} under this strategy: {name} {has}, and "
                    f"the strategy gives it {list(own)}"
                )
        for rank in ranks:  # both strategies may give these the same parts
            note = self._opened[rank].note
            if note is not None and note.strategy not in ("", self._digest):
                raise RuntimeStateError(
                    f"{self.files[rank]} was saved under another strategy than the one that is given; give the "
                    "strategy file of its training"
                )

    def read(self, name: str, shape: tuple[int, ...], wanted: Slices, into: Tensor) -> None:
        """Copy the range `wanted` of a whole weight."""
        layout = self.layouts.get(name)
        for rank, own in holders(layout, shape):
            if rank in self._opened and (common := common_part(own, wanted)) is not None:
                self._opened[rank].read(name, within(common, own), into[within(common, wanted)])

    def _own(self, name: str, shape: tuple[int, ...], rank: int) -> Slices:
        return slices_of(self.strategy, name, shape, rank)


def digest_of(strategy: Plan | None) -> str:
    """A digest of how a strategy splits the weights over all ranks; "" for None."""
    if strategy is None:
        return ""
    weights = sorted((t.name, t.shape, t.codes) for t in strategy.inputs if t.role is Role.PARAMETER)
    return hashlib.sha256(json.dumps([strategy.sizes, weights]).encode()).hexdigest()


def _by_rank(files: Mapping[int, RankFile]) -> Mapping[int, RankFile]:
    """The files of all ranks by the ranks that they state; in the given order if none states it."""
    if all(file.note is None for file in files.values()):
        return files
    by_rank: dict[int, RankFile] = {}
    for file in files.values():
        if file.note is None:
            raise RuntimeStateError(
                f"{file.path} does not say whose file it is, and others do; give the files of one checkpoint"
            )
        other = by_rank.setdefault(file.note.rank, file)
        if other is not file:
            raise RuntimeStateError(
                f"{other.path} and {file.path} are both the file of rank {file.note.rank}; give one of each"
            )
    return dict(sorted(by_rank.items()))


def _check_notes(files: Mapping[int, RankFile], count: int) -> None:
    """Raise RuntimeStateError for a file that states another rank, or another number of ranks."""
    for rank, file in files.items():
        if file.note is not None and (file.note.rank, file.note.ranks) != (rank, count):
            raise RuntimeStateError(
                f"{file.path} is the file of rank {file.note.rank} of {file.note.ranks}, and was given for rank "
                f"{rank} of {count}; give each rank's own, and the strategy file of their training"
            )


def _span(parts: Iterable[tuple[int, int]]) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in parts)}]"


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

    note = Note.of(rank, target.mesh.device_num if target else 1, wanted, target)
    return written_file(path, {name: (source.dtype(name), shape) for name, shape in shapes.items()}, made(), note)


def write_file(path: Path, parts: Mapping[str, Tensor], note: Note) -> Path:
    """Write tensors to the safetensors file `path`: all of it or nothing."""
    specs = {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}
    return written_file(path, specs, parts.items(), note)


def written_file(
    path: Path,
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    parts: Iterable[tuple[str, Tensor]],
    note: Note,
) -> Path:
    """Write tensors, which `parts` may yield one at a time, to the safetensors file `path`: all of it or nothing."""
    (file,) = arrange(specs, path.stem, 1 << 62, {_NOTE: note.model_dump_json()}).values()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_foreign(path):
            raise RuntimeStateError(f"{path} cannot be written: {FOREIGN}")
        with replacing(path) as (out, aside):
            places = {name: replace(place, file=aside.name) for name, place in file.places.items()}
            begin(out, file)
            for name, part in parts:
                whole = tuple(slice(0, size) for size in part.shape)
                write_part(path.parent, places[name], whole, part, lambda done: None)
            synchronize(path.parent, [aside.name])
    except (OSError, ValueError) as error:
        raise RuntimeStateError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return path


def _is_foreign(path: Path) -> bool:
    """Whether the file exists, is not empty, and has no note."""
    try:
        return path.is_file() and path.stat().st_size > 0 and RankFile(path).note is None
    except RuntimeStateError:
        return True


def shape_of(strategy: Plan | None, name: str) -> tuple[int, ...]:
    """The whole shape of a weight in a strategy."""
    assert strategy is not None
    return next(tuple(t.shape) for t in strategy.inputs if t.name == name and t.role is Role.PARAMETER)


def slices_of(strategy: Plan | None, name: str, shape: tuple[int, ...], rank: int) -> Slices:
    """The slices of a weight that a rank has under a strategy."""
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
