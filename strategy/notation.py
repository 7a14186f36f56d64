"""What users write: the three notations of a strategy, and their conversions to and from a layout.

    names        ("dp", None)  (("dp", "tp"), None)    per dim: an axis, several (major first), or None
    ints         (2, 4)                                per dim: the number of parts; the axes are left open
    placements   (Shard(0), Replicate())               per mesh axis, ours or DTensor's; or a Layout

Notations end here: an `Annotation` has only the layout, or the split counts, that a user asked for. This file reads
well-formed strategies; `validate.py` finds the problems of others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import Problem, StrategyError, raise_problems
from .layout import Layout, layout
from .mesh import Mesh
from .placement import REPLICATE, Broadcast, Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement as TorchPlacement

Name = str | tuple[str, ...] | None


class Form(Enum):
    """The notation of a strategy."""

    NAMES = "axis names"
    INTS = "split counts"
    PLACEMENTS = "placements"


@dataclass(frozen=True, slots=True)
class Annotation:
    """A user's strategy for one tensor on one mesh: one layout, or split counts with the axes left open. `chunked`: the
    tensor must be cut as a DTensor is. `varies`: a dim of one element stays whole, whatever the strategy says."""

    mesh: Mesh
    meaning: Layout | tuple[int, ...]
    text: str = field(compare=False)
    chunked: bool = False
    varies: bool = False

    def layouts(self, shape: Sequence[int]) -> tuple[Layout, ...]:
        """The layouts that it allows for a tensor of `shape`; none if that shape cannot be laid out so."""
        size = tuple(shape)
        cuts = (one.without_single(size) for one in self.cuts(len(size)) if self.varies or one.fits(size))
        fitting = dict.fromkeys(one for one in cuts if one.fits(size))
        return tuple(one for one in fitting if not self.chunked or one.chunks(size))

    def allows(self, layout: Layout, ndim: int) -> bool:
        """Whether `layout` is one of its layouts for a tensor of `ndim` dims."""
        return layout in self.cuts(ndim)

    def cuts(self, ndim: int) -> tuple[Layout, ...]:
        """The layouts that it may mean for a tensor of `ndim` dims of any sizes."""
        if isinstance(self.meaning, Layout):
            return (self.meaning,)
        return layouts_of_counts(self.mesh, self.meaning) if len(self.meaning) == ndim else ()

    def __str__(self) -> str:
        return self.text


def form_of(strategy: object) -> Form | None:
    """The notation that all entries of `strategy` belong to, or None."""
    if isinstance(strategy, Layout):
        return Form.PLACEMENTS
    if not isinstance(strategy, tuple | list):
        return None
    forms = set(Form) if isinstance(strategy, tuple) else {Form.PLACEMENTS}
    forms = forms.intersection(*map(forms_of_entry, strategy))
    return next((form for form in Form if form in forms), None)


def forms_of_entry(entry: object) -> frozenset[Form]:
    """The notations that `entry` may belong to; None, a whole dim, belongs to two."""
    match entry:
        case None:
            return frozenset({Form.NAMES, Form.INTS})
        case bool():
            return frozenset()
        case int():
            return frozenset({Form.INTS})
        case str():
            return frozenset({Form.NAMES})
        case tuple() if all(isinstance(axis, str) for axis in entry):
            return frozenset({Form.NAMES})
        case _ if isinstance(entry, Shard | Replicate | Broadcast | Partial) or _is_torch(entry):
            return frozenset({Form.PLACEMENTS})
    return frozenset()


def read(strategy: Any, mesh: Mesh, ndim: int, chunked: bool = False, varies: bool = False) -> Annotation:
    """The annotation that a valid `strategy` stands for."""
    meaning: Layout | tuple[int, ...]
    match form_of(strategy):
        case Form.INTS:
            meaning = counts_of(strategy)
        case Form.NAMES:
            owner = {axis: dim for dim, entry in enumerate(strategy) for axis in axes_of(entry)}
            meaning = layout(mesh, tuple(Shard(owner[a]) if a in owner else REPLICATE for a in mesh.axes))
        case _:
            meaning = from_dtensor(placements_of(strategy), mesh, ndim)
    text = str(strategy) if isinstance(strategy, Layout) else repr(strategy)
    return Annotation(mesh, meaning, text, chunked, varies)


def axes_of(entry: Name) -> tuple[str, ...]:
    """The axis names in one entry of the names notation, major first."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def counts_of(strategy: Sequence[int | None]) -> tuple[int, ...]:
    """The split counts of the ints notation."""
    return tuple(1 if count is None else count for count in strategy)


def placements_of(strategy: Layout | Sequence[Any]) -> tuple[Any, ...]:
    """The placements, ours or DTensor's, of the placements notation."""
    return strategy.placements if isinstance(strategy, Layout) else tuple(strategy)


def read_placement(where: str, placement: Any, ndim: int) -> Placement | Problem:
    """Our placement for one of ours or of DTensor's, on a tensor of `ndim` dims; or the Problem if there is none."""
    if _is_torch(placement):
        from torch.distributed import tensor as dt

        if type(placement) is dt.Replicate:
            return REPLICATE
        if type(placement) is dt.Partial and placement.reduce_op in ("sum", "max"):
            return Partial(placement.reduce_op)
        if type(placement) is not dt.Shard:
            return Problem(where, f"{placement!r} has no equivalent in Partway", "write Shard(dim) or Replicate()")
    elif not isinstance(placement, Shard):
        assert isinstance(placement, Replicate | Broadcast | Partial)
        return placement
    if not -ndim <= placement.dim < ndim:
        fix = f"write a dim of 0 to {ndim - 1}, or Replicate()" if ndim else "write Replicate()"
        return Problem(where, f"{placement!r} splits a dim that a tensor of {counted(ndim, 'dim')} does not have", fix)
    return Shard(placement.dim % ndim)


def from_dtensor(placements: Sequence[Any], mesh: Mesh, ndim: int) -> Layout:
    """The layout with DTensor's placements (negative dims count from the end), on a tensor of `ndim` dims.

    Raises StrategyError for a wrong number of placements, a missing dim, or a placement that Partway does not have.
    """
    ours = tuple(read_placement(f"placement {i}", one, ndim) for i, one in enumerate(placements))
    raise_problems("the placements cannot be read:", (one for one in ours if isinstance(one, Problem)))
    return layout(mesh, tuple(one for one in ours if not isinstance(one, Problem)))


@functools.lru_cache(maxsize=65536)
def to_dtensor(layout: Layout) -> tuple[TorchPlacement, ...]:
    """The torch.distributed.tensor placements of `layout`. Raises StrategyError for Broadcast, which DTensor lacks."""
    from torch.distributed import tensor as dt

    def convert(placement: Placement) -> TorchPlacement:
        match placement:
            case Shard(dim):
                return dt.Shard(dim)
            case Replicate():
                return dt.Replicate()
            case Partial(reduce):
                return dt.Partial(reduce)
        raise StrategyError(
            f"the layout {layout} has a Broadcast, which DTensor cannot express; convert the tensor to Replicate() "
            "first"
        )

    return tuple(map(convert, layout.placements))


def to_placements(layout: Layout) -> tuple[Placement, ...]:
    """Partway's placements of `layout`, one for each mesh axis."""
    return layout.placements


def to_names(layout: Layout, ndim: int) -> tuple[Name, ...]:
    """The axis names that split each of `ndim` dims. Raises StrategyError if `layout` has other placements."""
    _check_only_splits(layout, ndim, Form.NAMES)
    entries = (layout.axes_of(dim) for dim in range(ndim))
    return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries)


def to_ints(layout: Layout, ndim: int) -> tuple[int, ...]:
    """The number of parts of each of `ndim` dims. Raises StrategyError if `layout` has other placements."""
    _check_only_splits(layout, ndim, Form.INTS)
    return layout.splits(ndim)


def coarsest_mesh(device_num: int, strategies: Iterable[tuple[int | None, ...]]) -> Mesh:
    """The mesh of `device_num` devices with the fewest axes on which every strategy of ints can be written.

    Of several with equally few axes, it is the one with the smallest sizes first: 8 with (2, 4) and (4, 1) is d0=2,
    d1=4. Raises StrategyError, listing each strategy that cannot be written on any mesh of `device_num` devices.
    """
    finest, wanted, problems = Mesh.flat(device_num), set(), []
    for strategy in strategies:
        if not all(Form.INTS in forms_of_entry(entry) for entry in strategy):
            problems.append(
                Problem(f"strategy {strategy!r}", "it is not a tuple of ints", "write one split count per dim")
            )
            continue
        counts = counts_of(strategy)
        wanted.add(counts)
        if min(counts, default=1) < 1 or device_num % math.prod(counts):
            fix = f"write a tuple of split counts whose product divides {device_num}"
            problems.append(Problem(f"strategy {strategy!r}", f"no mesh of {device_num} devices allows it", fix))
    raise_problems(f"no mesh of {device_num} devices fits:", problems)
    # The order of the axes does not decide whether a strategy can be written, so ascending sizes stand for all orders.
    candidates = sorted(_ascending_factors(device_num), key=lambda sizes: (len(sizes), sizes))
    fits = (sizes for sizes in candidates if all(can_write(sizes, counts) for counts in wanted))
    return Mesh.of_sizes(next(fits, finest.sizes))


def meshes_of(device_num: int, strategies: Iterable[tuple[int | None, ...]], node: int | None = None) -> list[Mesh]:
    """The meshes of `device_num` devices to search, those with fewer axes first: every mesh of at most three axes on
    which all strategies of ints can be written, or only the coarsest mesh if that takes more axes. A finer mesh can do
    everything that a coarser one of the same order can.

    node    the number of neighbouring devices with faster links between them; if it divides `device_num`, no axis
            crosses the border of a node

    Raises StrategyError as `coarsest_mesh` does.
    """
    strategies = list(strategies)
    coarsest = coarsest_mesh(device_num, strategies)
    wanted = [counts_of(strategy) for strategy in strategies]

    def aligned(sizes: tuple[int, ...]) -> bool:
        if not node or device_num <= node or device_num % node:
            return True
        return node in [math.prod(sizes[i:]) for i in range(len(sizes))]

    every = [sizes for count in (1, 2, 3) for sizes in _ordered_factors(device_num, count) if aligned(sizes)]
    fits = [sizes for sizes in every if all(can_write(sizes, counts) for counts in wanted)]
    return list(dict.fromkeys([Mesh.of_sizes(sizes) for sizes in fits] or [coarsest]))


def _ordered_factors(n: int, count: int) -> Iterator[tuple[int, ...]]:
    """The ways to write `n` as a product of `count` factors, none of them 1 (but for one factor)."""
    if count == 1:
        yield (n,)
        return
    for first in range(2, n // 2 + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in _ordered_factors(n // first, count - 1))


def can_write(sizes: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether mesh axes of these sizes can split the dims into `counts` parts."""
    return next(_assignments(tuple(sizes), tuple(counts)), None) is not None


@lru_cache(maxsize=65536)
def layouts_of_counts(mesh: Mesh, counts: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout on `mesh` that splits the dims into `counts` parts; unused axes, and those of size 1, replicate."""
    return tuple(
        layout(mesh, tuple(REPLICATE if dim is None else Shard(dim) for dim in dims))
        for dims in _assignments(mesh.sizes, counts)
    )


def _assignments(sizes: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[tuple[int | None, ...]]:
    """Each way to give every axis a dim to split, or None, so that the dims are split into `counts` parts."""
    if math.prod(sizes) % math.prod(counts):
        return
    if not sizes:
        yield ()
        return
    size, rest = sizes[0], sizes[1:]
    for dim, count in enumerate(counts):
        if size > 1 and count % size == 0:
            remaining = (*counts[:dim], count // size, *counts[dim + 1 :])
            yield from ((dim, *tail) for tail in _assignments(rest, remaining))
    yield from ((None, *tail) for tail in _assignments(rest, counts))


def _ascending_factors(n: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """The factorisations of `n` into factors of at least `least`, each in ascending order; (1,) for 1."""
    yield (n,)
    for first in range(least, math.isqrt(n) + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in _ascending_factors(n // first, first))


def _check_only_splits(layout: Layout, ndim: int, form: Form) -> None:
    for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
        if isinstance(placement, Broadcast | Partial):
            raise StrategyError(
                f"the layout {layout} is {type(placement).__name__} on axis {axis!r}, "
                f"which {form.value} cannot express; write placements"
            )
        if isinstance(placement, Shard) and placement.dim >= ndim:
            raise StrategyError(
                f"the layout {layout} splits dim {placement.dim}, which a tensor of {counted(ndim, 'dim')} lacks"
            )


def _is_torch(entry: object) -> bool:
    # The type's name is compared first, so that planning does not import torch.distributed for strategies without it.
    if not type(entry).__module__.startswith("torch.distributed."):
        return False
    from torch.distributed.tensor import Placement as TorchPlacement

    return isinstance(entry, TorchPlacement)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`number` with its noun: 1 dim, 2 dims."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
