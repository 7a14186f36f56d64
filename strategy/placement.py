"""The placement algebra: the state of one tensor on one mesh axis, and how one state becomes another.

Each placement has a *dual*, the placement of its gradient, so a conversion's transpose needs no table of its
own: the backward of `source → target` is `dual(target) → dual(source)`. (JAX's explicit sharding calls
Replicate and Broadcast "reduced" and "unreduced"; Megatron-LM's f and g are the conversions
Replicate → Broadcast and Partial → Replicate.)

    placement of the value     every rank holds           placement of its gradient
    Shard(d)                   its slice of dim d         Shard(d)
    Replicate                  the whole value            Replicate
    Broadcast                  the whole value            Partial(sum): each rank's gradient is an addend
    Partial(sum)               an addend of the value     Replicate: every addend gets the whole gradient
    Partial(max)               a candidate: the value is  none: only values without a gradient have this placement
                               the largest of them
    SliceWindow(d)             its slice of dim d and     SliceWindow(d) of addends: an element in several windows
                               elements next to it        gets an addend from each
    Routed(by, d)              the rows, along dim d, of  Routed(by, d)
                               its tokens or experts
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .cut import Cut, SliceWindow
from .errors import StrategyError, shown


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank of the axis holds its slice of dim `dim`, in rank order. In a program, `cut` is the cut of the dim
    unless all slices are full; in a layout it is None."""

    dim: int
    cut: Cut | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 0:
            raise StrategyError(
                f"Shard(dim) takes a dim of 0 or more, not {shown(self.dim)}; count dims from the front"
            )

    def __str__(self) -> str:
        return f"S{self.dim}" + (f"|{self.cut}" if self.cut else "")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole value, and will hold the whole gradient."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every rank holds the whole value for work of its own: its gradient is an addend."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds an addend of the value; with `reduce="max"`, a candidate: the value is the largest of them."""

    reduce: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce not in ("sum", "max"):
            raise StrategyError(f"Partial(reduce) takes 'sum' or 'max', not {shown(self.reduce)}")

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P{self.reduce}"


@dataclass(frozen=True, slots=True)
class Routed:
    """Every rank holds some rows of a mixture of experts, along dim `dim`, sorted by expert: those of its own tokens
    (`by` is "token"), or those of its own experts ("expert"). `dim` is None for what all experts have of a rank's
    tokens, such as the numbers of their rows. Slots by "copy" are those of rows whose tokens came once to each rank of
    the axis, and were copied there for its experts. The number of an expert's rows is known only at run time; in a
    program `rows` is the number that is expected, in a layout it is None. Only operators on routed rows convert
    them."""

    by: str
    dim: int | None = 0
    rows: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.by not in _ROUTED.values():
            raise StrategyError(f"Routed(by) takes 'token', 'expert' or 'copy', not {shown(self.by)}")

    def __str__(self) -> str:
        dim = "" if self.dim is None else str(self.dim)
        return self.by[0].upper() + dim + ("" if self.rows is None else f"|{self.rows}")


sharded = functools.lru_cache(maxsize=1024)(Shard)  # the one Shard of a dim, for loops over dims
Placement = Shard | Replicate | Broadcast | Partial | SliceWindow | Routed

REPLICATE = Replicate()
BROADCAST = Broadcast()
PARTIAL = Partial()
PARTIAL_MAX = Partial("max")


class Kind(StrEnum):
    """How a conversion is done along its axes. The kinds in `LOCAL` need no other rank; the others are collectives,
    each with a row in `propagation/ops/collectives.py`."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALLV = "all_to_allv"  # send each rank the rows of its experts or tokens, as many as there are
    EXCHANGE = "exchange"  # make windows from neighbours' slices, or add up their overlaps
    SLICE = "slice"  # keep this rank's slice of a whole value
    PAD = "pad"  # zeros around this rank's slice: an addend of the whole
    KEEP = "keep"  # rank 0 keeps the value, the others hold zeros: addends of it
    NOTHING = "nothing"  # only the meaning changes

    communicates: bool  # whether it is a collective


LOCAL = frozenset({Kind.SLICE, Kind.PAD, Kind.KEEP, Kind.NOTHING})
for _each in Kind:
    _each.communicates = _each not in LOCAL  # an attribute, because it is read for each conversion of each option

# (from, to) by type. Only the forward kind is written: `transpose` derives the backward from the duals.
_KINDS: dict[tuple[type, type], Kind] = {
    (Shard, Replicate): Kind.ALL_GATHER,
    (Shard, Broadcast): Kind.ALL_GATHER,
    (Shard, Partial): Kind.PAD,
    (Replicate, Shard): Kind.SLICE,
    (Replicate, Broadcast): Kind.NOTHING,
    (Replicate, Partial): Kind.KEEP,
    (Broadcast, Shard): Kind.SLICE,
    (Broadcast, Replicate): Kind.NOTHING,
    (Broadcast, Partial): Kind.KEEP,
    (Partial, Shard): Kind.REDUCE_SCATTER,
    (Partial, Replicate): Kind.ALL_REDUCE,
    (Partial, Broadcast): Kind.ALL_REDUCE,
}

# With Partial(max): the largest of equal copies is the copy itself, and no single step leads to or from a split.
_MAX_KINDS: dict[tuple[type, type], Kind] = {
    (Replicate, Partial): Kind.NOTHING,
    (Broadcast, Partial): Kind.NOTHING,
    (Partial, Replicate): Kind.ALL_REDUCE,
    (Partial, Broadcast): Kind.ALL_REDUCE,
}


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value placed as `placement`. Raises StrategyError for Partial(max)."""
    match placement:
        case Broadcast():
            return PARTIAL
        case Partial("max"):
            raise StrategyError("Partial('max') has no dual: it is for values without a gradient; detach the operand")
        case Partial():
            return REPLICATE
        case SliceWindow():
            return replace(placement, adds=not placement.adds)
        case _:
            return placement


def adjoint(placement: Placement) -> Placement:
    """The placement of a gradient that is differentiated again: for addends it is `Broadcast`, whose own gradient is
    an addend. The adjoint of the adjoint is `placement` again."""
    return BROADCAST if placement == PARTIAL else dual(placement)


def kind(source: Placement, target: Placement) -> Kind:
    """The kind of the conversion from `source` to `target`. Raises StrategyError if no single step converts them."""
    step = _kind(source, target)
    if step is None:
        raise StrategyError(f"no single step turns {source} into {target}; convert to R first")
    return step


def converts(source: Placement, target: Placement) -> bool:
    """Whether a single step turns `source` into `target`: true of all pairs but Partial(max) with a split or with
    addends, windows with anything but their slices, and routed rows, whose conversion needs the numbers of rows."""
    return _kind(source, target) not in (None, Kind.ALL_TO_ALLV)


def step_kind(source: Placement, target: Placement, phase: str, gradient: bool) -> Kind:
    """The kind of a step in the "forward" or the "backward"; `gradient`: its transpose runs in the backward."""
    if phase == "forward":
        return kind(source, target)
    return kind(*transpose(source, target)) if gradient else Kind.NOTHING


@functools.lru_cache(maxsize=1024)
def steps_between(states: tuple[Placement, ...], gradient: bool) -> tuple[tuple[int, int, tuple[Kind, ...]], ...]:
    """The single steps from one of `states` to another, each as (from, to, its kinds): that of its forward and, with
    `gradient`, that of its backward."""
    phases = ("forward", "backward") if gradient else ("forward",)
    return tuple(
        (i, j, tuple(step_kind(source, target, phase, gradient) for phase in phases))
        for (i, source), (j, target) in itertools.permutations(enumerate(states), 2)
        if converts(source, target)
    )


@functools.lru_cache(maxsize=4096)
def _kind(source: Placement, target: Placement) -> Kind | None:
    if source == target:
        return Kind.NOTHING
    if isinstance(source, Shard) and isinstance(target, Shard):
        return Kind.ALL_TO_ALL
    if isinstance(source, Routed) and isinstance(target, Routed):
        return Kind.ALL_TO_ALLV if source.dim == target.dim and source.by != target.by else None
    for one, other, adds in ((source, target, True), (target, source, False)):
        if isinstance(one, SliceWindow):
            fits = isinstance(other, Shard) and other.dim == one.dim and one.adds is adds
            return Kind.EXCHANGE if fits else None
    table = _MAX_KINDS if PARTIAL_MAX in (source, target) else _KINDS
    return table.get((type(source), type(target)))


def transpose(source: Placement, target: Placement) -> tuple[Placement, Placement]:
    """The conversion of the gradient of `source → target`, as (source, target)."""
    return dual(target), dual(source)


@functools.lru_cache(maxsize=4096)
def placement_from_code(code: str) -> Placement:
    """The placement whose `str` is `code`: "S0", "S1", ..., "R", "B", "P", "Pmax"; in programs also "S1|28/8". Raises
    StrategyError for other texts."""
    if code in _FIXED:
        return _FIXED[code]
    dim, _, cut = code[1:].partition("|")
    try:
        if code[:1] == "S":
            return Shard(int(dim), Cut.of_text(cut) if cut else None)
        if code[:1] == "W":
            return SliceWindow.of_text(code)
        if code[:1] in _ROUTED:
            return Routed(_ROUTED[code[:1]], int(dim) if dim else None, int(cut) if cut else None)
    except ValueError:  # not a number, or one with more digits than Python reads
        pass
    raise StrategyError(f"{shown(code)} is not a placement; write S<dim>, R, B, P or Pmax")


_ROUTED = {"T": "token", "E": "expert", "C": "copy"}
_FIXED: dict[str, Placement] = {str(p): p for p in (REPLICATE, BROADCAST, PARTIAL, PARTIAL_MAX)}
