"""What changes from call to call, sizes of tensors and ints, and captures that serve all of it.

A call that differs from an earlier one only in sizes has a graph of the same operators. So a dim that `dynamic` names,
or that has been seen with two sizes, gets a symbol in the next capture (propagation/capture/symbols.py), and calls of
other sizes use that capture and the strategies of its plan. New captures are made for the sizes 0 and 1, for a size
with which the function takes another branch, and for a function that has no capture for all sizes.

An int that changes, such as the length of a generated text so far, becomes an input of the graph, and one plan serves
all calls of the same course. A function without such a graph, because sizes depend on the int, is planned for each.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partway.propagation.capture.capture import Around, CaptureOptions, graph_at
from partway.propagation.capture.export.tracing import Dims
from partway.propagation.capture.symbols import AnySize, OtherSizesError
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.structure import Call, Path, numbers_between
from partway.propagation.plan.plan import Plan
from partway.reuse.effects import Effects
from partway.reuse.replanning import Signature
from partway.reuse.state import State
from partway.strategy import CaptureError, Problem, raise_problems

_log = logging.getLogger("partway")
MOST_FAMILIES = 8  # of one function; the oldest is dropped first
_MOST_PLANS = 32
_SAME_DIMS = 3  # captures for the same dims: a function that branches on sizes has several


@dataclass(frozen=True)
class Captured:
    """A captured call, the state on which it depends beside its arguments, and its side effects."""

    graph: Graph
    state: State
    effects: Effects


@dataclass
class Family:
    """Calls that differ only in sizes: the function captured for all of them with these `options`, and the state and
    effects as in Captured."""

    captured: AnySize
    options: CaptureOptions
    state: State
    effects: Effects

    def at(self, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around) -> Captured:
        """The capture of a call, by that of the family. Raises OtherSizesError if the function may take another
        branch."""
        return Captured(graph_at(self.captured, args, kwargs, self.options, around), self.state, self.effects)

    def holds(self) -> bool:
        """Whether the state on which it depends is as it was."""
        state = self.state.renewed(self.captured.attempt.fn)
        self.state = state or self.state
        return state is not None


class Sizes:
    """The known sizes of one function's tensors. `declared`: the `dynamic` of its request."""

    def __init__(self, declared: Mapping[str, Mapping[int, tuple[int, int] | None]]) -> None:
        self._declared = declared
        self._seen: defaultdict[Hashable, set[tuple[int, int]]] = defaultdict(set)
        self._fixed: defaultdict[Hashable, set[tuple[int, int]]] = defaultdict(set)
        self._families: list[tuple[Signature, Family]] = []  # with their signatures without the sizes
        self.refused: dict[Signature, str] = {}  # why there is no capture for all sizes
        # searched plans, by the signature without sizes and whether for inference
        self.plans: OrderedDict[tuple[Signature, bool], Plan] = OrderedDict()

    def of(self, call: Call, key: Signature, known: Sequence[Signature]) -> CallSizes:
        """The known sizes for a call of the new signature `key`; `known`: the signatures of other calls. Raises
        StrategyError for a size outside the declared ones."""
        kind, shapes = _kind(key), [shape for shape, *_ in key.tensors]
        seen = self._seen[kind]
        for other in known:
            if _kind(other) == kind:
                seen |= _differing(shapes, [shape for shape, *_ in other.tensors])
        dims = (seen | self._dims_declared(call)) - self._fixed[kind]
        return CallSizes(self, key, frozenset((place, dim) for place, dim in dims if shapes[place][dim] >= 2))

    def _dims_declared(self, call: Call) -> set[tuple[int, int]]:
        dims: set[tuple[int, int]] = set()
        problems: list[Problem] = []
        for name, sizes in self._declared.items():
            places = [i for i, names in enumerate(zip(call.arguments, call.names, strict=True)) if name in names]
            if not places:
                fix = f"write one of {', '.join(dict.fromkeys(call.arguments)) or 'no names'}"
                problems.append(Problem("dynamic", f"names {name!r}, and the call has no such tensor", fix))
            for place in places:
                tensor, given = call.tensors[place], call.names[place]
                for dim, bounds in sizes.items():
                    if not -tensor.dim() <= dim < tensor.dim():
                        fix = f"write a dim from 0 to {tensor.dim() - 1}"
                        what = f"names dim {dim} of {given!r}, a tensor of {tensor.dim()} dims"
                        problems.append(Problem("dynamic", what, fix))
                        continue
                    size, dim = tensor.shape[dim], dim % tensor.dim()
                    if bounds is not None and not bounds[0] <= size <= bounds[1]:
                        what = f"is {size}, and dynamic says {bounds[0]} to {bounds[1]}"
                        fix = "give a tensor of such a size, or declare more sizes"
                        problems.append(Problem(f"dim {dim} of {given!r}", what, fix))
                    dims.add((place, dim))
        raise_problems("the sizes of this call are not those that were declared:", problems)
        return dims

    def families(self, key: Signature) -> list[tuple[Signature, Family]]:
        """The families of a call of the signature `key`, with their own signatures, the newest first."""
        found = [(blank, each) for blank, each in reversed(self._families) if blank == _blank(key, each.captured.dims)]
        return [(blank, each) for blank, each in found if each.holds()]

    def add(self, blank: Signature, family: Family) -> None:
        """Keep a family."""
        self._families = [*self._families, (blank, family)][-MOST_FAMILIES:]
        self._fixed[_kind(blank)] |= family.captured.attempt.changing - family.captured.dims
        if self._declared and (fixed := family.captured.fixed):
            self._warn(f"the function counts on the size of {fixed}")

    def refuse(self, blank: Signature, why: str) -> None:
        """Note why calls that differ only in the sizes missing in `blank` have no common capture."""
        self.refused[blank] = why
        if self._declared:
            self._warn(why)

    def _warn(self, why: str) -> None:
        _log.warning("what dynamic declares has a plan for each size: %s", why)


@dataclass
class CallSizes:
    """The known sizes of one call to be planned.

    key      its signature
    dims     the dims whose sizes change
    alike    the signature of its family, once it is captured
    """

    sizes: Sizes
    key: Signature
    dims: Dims
    alike: Signature | None = None

    def captured(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Around,
        capture: Callable[[Dims], Family],
    ) -> Captured | None:
        """The capture of the call, made from one for all sizes: an earlier one or, if none applies, the one that
        `capture` makes. None: the call has to be captured by itself."""
        families = self.sizes.families(self.key)
        for blank, family in families:
            with contextlib.suppress(OtherSizesError):
                found = family.at(args, kwargs, around)
                self.alike = blank
                return found
        blank = _blank(self.key, self.dims)
        if not self.dims or blank in self.sizes.refused or len(families) >= _SAME_DIMS:
            return None
        try:
            family = capture(self.dims)
            if not family.captured.dims:
                raise CaptureError(f"it counts on the size of {family.captured.fixed}")
            found = family.at(args, kwargs, around)
        except (CaptureError, OtherSizesError) as error:
            self.sizes.refuse(blank, str(error).splitlines()[0])
            return None
        self.alike = _blank(self.key, family.captured.dims)
        self.sizes.add(self.alike, family)
        return found

    @property
    def known(self) -> bool:
        """Whether there is a family of the call."""
        return bool(self.sizes.families(self.key))

    def plan(self, inference: bool) -> Plan | None:
        """The searched plan of calls like this one with other sizes, or None."""
        return self.sizes.plans.get((self.alike or _blank(self.key, self.dims), inference))

    def searched(self, plan: Plan, inference: bool) -> None:
        """Keep the searched plan of the call."""
        if self.alike or self.dims:
            self.sizes.plans[self.alike or _blank(self.key, self.dims), inference] = plan
            while len(self.sizes.plans) > _MOST_PLANS:
                self.sizes.plans.popitem(last=False)

    @property
    def why_not(self) -> str:
        """Why the call has no capture for all sizes; "" if it has one, or needs none."""
        return "" if self.alike else self.sizes.refused.get(_blank(self.key, self.dims), "")


def _kind(key: Signature) -> Hashable:
    """The part of a signature that is equal for calls with comparable sizes."""
    return key.structure, tuple(len(shape) for shape, *_ in key.tensors)


def _differing(shapes: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> set[tuple[int, int]]:
    """The dims, as (tensor, dim), of different sizes that are both at least 2."""
    return {
        (place, dim)
        for place, pair in enumerate(zip(shapes, others, strict=True))
        for dim, (size, other) in enumerate(zip(*pair, strict=True))
        if size != other and min(size, other) >= 2
    }


def _blank(key: Signature, dims: Dims) -> Signature:
    """A signature without the sizes of `dims`, and without the strides of dense tensors, which depend on them."""
    memory, gradients = key.answers
    if memory is not None:
        shapes = [shape for shape, *_ in key.tensors]
        memory = tuple(
            "dense" if strides == _dense(shape) else strides for strides, shape in zip(memory, shapes, strict=True)
        )
    tensors = tuple(
        (tuple(-1 if (place, dim) in dims else size for dim, size in enumerate(shape)), *rest)
        for place, (shape, *rest) in enumerate(key.tensors)
    )
    return key._replace(tensors=tensors, answers=(memory, gradients))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class Numbers:
    """The changing numbers in the calls of one function."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Path, ...]] = {}  # by the structure of calls without them
        self._refused: set[tuple[Any, ...]] = set()

    def of(self, call: Call) -> Call:
        """`call`, with tensors in place of the numbers that are known to change."""
        for paths in dict.fromkeys(self._known.values()):
            counting = call.counting(paths)
            if counting is not None and counting.structure.key() in self._known:
                return counting
        return call

    def learn(self, call: Call, now: Call, key: Signature, known: Sequence[Signature]) -> bool:
        """Note the numbers that change if the call differs from one of the `known` ones only in numbers; returns
        whether it does. `now`: the call with tensors for the numbers known so far, of the signature `key`."""
        for before in reversed(known):
            if key._replace(structure=()) != before._replace(structure=()):
                continue
            if paths := numbers_between(key.structure, before.structure):
                counting = call.counting((*now.paths, *paths))
                if counting is not None and (alike := counting.structure.key()) not in self._refused:
                    self._known[alike] = counting.paths
                    return True
        return False

    def refuse(self, call: Call) -> None:
        """Note that there is no graph of `call` for all its numbers."""
        alike = call.structure.key()
        self._known.pop(alike, None)
        self._refused.add(alike)
